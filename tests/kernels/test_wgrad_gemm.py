"""The weight-gradient GEMM adds to the main gradient in full precision."""

import pytest
import torch

from pentad.kernels.wgrad_gemm import accumulate_gradient_


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_it_adds_to_the_main_gradient(dtype: torch.dtype) -> None:
    main, dy, x = torch.randn(3, 4, dtype=dtype), torch.randn(7, 3, dtype=dtype), torch.randn(7, 4, dtype=dtype)
    expected = main + torch.einsum("tn,tk->nk", dy, x)
    accumulate_gradient_(main, dy, x)
    assert torch.allclose(main, expected, rtol=1e-5 if dtype == torch.float32 else 1e-13)


@pytest.mark.parametrize("tokens", [0, 7])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_it_overwrites_whatever_the_main_gradient_has(tokens: int, dtype: torch.dtype) -> None:
    dy, x = torch.randn(tokens, 3, dtype=dtype), torch.randn(tokens, 4, dtype=dtype)
    main = torch.full((3, 4), torch.nan, dtype=torch.float32 if dtype == torch.bfloat16 else dtype)
    expected = torch.zeros_like(main)
    accumulate_gradient_(main, dy, x, overwrite=True)
    accumulate_gradient_(expected, dy, x)
    assert torch.equal(main, expected)


def test_no_tokens_add_nothing() -> None:
    main = torch.randn(3, 4)
    before = main.clone()
    accumulate_gradient_(main, torch.empty(0, 3), torch.empty(0, 4))
    assert torch.equal(main, before)


def test_16_bit_products_are_not_rounded() -> None:
    main = torch.zeros(1, 1)
    dy = torch.full((1, 1), 1.0 + 2**-7, dtype=torch.bfloat16)
    accumulate_gradient_(main, dy, dy)
    assert main.item() == (1.0 + 2**-7) ** 2


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1, 8, 8), (7, 33, 65), (257, 576, 1536), (4096, 1024, 2048)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_on_a_gpu_nothing_is_rounded_to_16_bits(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    tokens, n, k = shape
    dy, x = torch.randn(tokens, n, device="cuda", dtype=dtype), torch.randn(tokens, k, device="cuda", dtype=dtype)
    main = 100 * torch.randn(n, k, device="cuda")
    expected, again, address = main.double(), main.clone(), main.data_ptr()
    accumulate_gradient_(expected, dy.double(), x.double())
    accumulate_gradient_(main, dy, x)
    accumulate_gradient_(again, dy, x)
    assert main.dtype == torch.float32 and main.data_ptr() == address
    assert float((main - expected).norm() / expected.norm()) < 1e-5
    assert torch.equal(main, again)
    accumulate_gradient_(main.fill_(torch.nan), dy, x, overwrite=True)
    accumulate_gradient_(again.zero_(), dy, x)
    assert float((main - again).norm() / again.norm()) < 1e-6
