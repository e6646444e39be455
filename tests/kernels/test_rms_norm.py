"""RMSNorm: the reference against autograd in float64, and Triton against the reference on a GPU."""

import pytest
import torch
from closeness import relative_error
from torch import Tensor

from pentad.kernels.rms_norm import rms_norm, rms_norm_backward

pytestmark = pytest.mark.usefixtures("fresh_memory_holds_nan")
EPS = 1e-5
ROWS = [1, 7, 257, 4096]
WIDTHS = [1, 33, 128, 576, 4096, 8192]


def definition(x: Tensor, weight: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
    summed = x if residual is None else x + residual
    return torch.nn.functional.rms_norm(summed, (x.shape[1],), weight, EPS), summed


@pytest.mark.parametrize(("fused", "offset"), [(False, 0.0), (True, 0.0), (True, 1.0)])
def test_the_reference_agrees_with_autograd(fused: bool, offset: float) -> None:
    torch.manual_seed(0)
    x, residual, dy, dsummed = torch.randn(4, 5, 24, dtype=torch.float64)
    weight = torch.randn(24, dtype=torch.float64)
    x.requires_grad_()
    weight.requires_grad_()
    y, summed = definition(x, weight + offset, residual if fused else None)
    (y * dy).sum().add((summed * dsummed).sum() if fused else 0.0).backward()

    found_y, found_sum, rstd = rms_norm(x.detach(), weight.detach(), EPS, residual if fused else None, offset)
    again = torch.empty_like(found_y)
    dx, dweight = rms_norm_backward(dy, found_sum, weight.detach(), rstd, dsummed if fused else None, offset, again)
    assert torch.equal(again, found_y)
    assert x.grad is not None and weight.grad is not None
    for found, expected in ((found_y, y), (found_sum, summed), (dx, x.grad), (dweight, weight.grad)):
        assert found.dtype == torch.float64
        assert relative_error(found, expected.detach()) < 1e-13


def test_without_a_residual_the_sum_is_the_input_itself() -> None:
    x = torch.randn(3, 8)
    assert rms_norm(x, torch.ones(8), EPS)[1] is x


def test_statistics_of_16_bit_inputs_are_float32() -> None:
    x = torch.randn(3, 8, dtype=torch.bfloat16)
    y, summed, rstd = rms_norm(x, torch.ones(8, dtype=torch.bfloat16), EPS, x)
    dx, dweight = rms_norm_backward(y, summed, torch.ones(8, dtype=torch.bfloat16), rstd)
    assert (y.dtype, summed.dtype, dx.dtype) == (torch.bfloat16,) * 3
    assert (rstd.dtype, dweight.dtype) == (torch.float32,) * 2


@pytest.mark.sampled(17)
@pytest.mark.gpu
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("width", [*WIDTHS, 16384, 65536])
@pytest.mark.parametrize("rows", ROWS)
def test_triton_agrees_with_the_reference(rows: int, width: int, dtype: torch.dtype, bound: float, fused: bool) -> None:
    if rows * width > 4096 * 8192:
        rows = 300
    x, residual, dy, dsummed = torch.randn(4, rows, width, device="cuda", dtype=dtype)
    weight = torch.randn(width, device="cuda", dtype=dtype)
    r = residual if fused else None
    d = dsummed if fused else None
    y, summed, rstd = rms_norm(x, weight, EPS, r)
    again = torch.empty_like(y)
    dx, dweight = rms_norm_backward(dy, summed, weight, rstd, d, again=again)
    assert torch.equal(again, y)

    want_y, want_sum, want_rstd = rms_norm(x.double(), weight.double(), EPS, None if r is None else r.double())
    want_dx, want_dweight = rms_norm_backward(
        dy.double(), want_sum, weight.double(), want_rstd, None if d is None else d.double()
    )
    pairs = [(y, want_y), (summed, want_sum), (rstd, want_rstd), (dx, want_dx), (dweight, want_dweight)]
    if width == 1:  # y depends on x only through eps: its gradient is noise
        pairs = pairs[:3]
    for found, expected in pairs:
        assert relative_error(found, expected) < bound


@pytest.mark.gpu
@pytest.mark.parametrize("width", [128, 4096, 8192])
def test_triton_is_bit_equal_from_run_to_run(width: int) -> None:
    x, residual, dy, dsummed = torch.randn(4, 1031, width, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(width, device="cuda", dtype=torch.bfloat16)

    def run() -> tuple[Tensor, ...]:
        y, summed, rstd = rms_norm(x, weight, EPS, residual)
        return (y, summed, rstd, *rms_norm_backward(dy, summed, weight, rstd, dsummed))

    first = run()
    for _ in range(5):
        assert all(torch.equal(a, b) for a, b in zip(first, run(), strict=True))
