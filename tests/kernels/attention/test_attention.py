"""Attention: against the written-out softmax in float64, and the fused backends on a GPU."""

import pytest
import torch
from closeness import relative_error
from torch import Tensor

from pentad.kernels.attention import attention as kernel
from pentad.kernels.attention.attention import attention, attention_backward, attention_reference

Shape = tuple[int, int, int, int, int]  # batch, query heads, key heads, positions, width


def inputs(shape: Shape, device: str, dtype: torch.dtype) -> list[Tensor]:
    """q, k, v and dout, as views of [B, S, heads, D] such as a packed projection gives."""
    batch, heads, groups, length, width = shape
    counts = (heads, groups, groups, heads)
    return [torch.randn(batch, length, n, width, device=device, dtype=dtype).transpose(1, 2) for n in counts]


def sliced(shape: Shape, slices: int, number: int, device: str, dtype: torch.dtype) -> list[Tensor]:
    """q and dout of one slice of the positions, k and v up to its end inside the room for all, [B, heads, S, D]."""
    batch, heads, groups, length, width = shape
    cut = length // slices
    q, _, _, dout = inputs((batch, heads, groups, cut, width), device, dtype)
    k, v = torch.randn(2, batch, groups, length, width, device=device, dtype=dtype)[:, :, :, : (number + 1) * cut]
    return [q, k, v, dout]


def agrees(given: list[Tensor], deterministic: bool, bound: float) -> None:
    """Forward and backward against float64."""
    q, k, v, dout = given
    out, saved = attention(q, k, v, deterministic)
    found = attention_backward(dout, saved)
    want_out, expected = gradients_by_autograd(q.double(), k.double(), v.double(), dout.double())
    assert relative_error(out, want_out) < bound
    for gradient, want in zip(found, expected, strict=True):
        assert relative_error(gradient, want) < bound


def gradients_by_autograd(q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    q, k, v = leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    out = attention_reference(q, k, v)
    return out.detach(), torch.autograd.grad(out, leaves, dout)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("shape", [(2, 4, 4, 9, 8), (1, 6, 2, 17, 16), (1, 4, 1, 2, 8)])
def test_attention_agrees_with_its_definition(shape: Shape, deterministic: bool) -> None:
    q, k, v, dout = inputs(shape, "cpu", torch.float64)
    with torch.no_grad():
        out, saved = attention(q, k, v, deterministic)
        found = attention_backward(dout, saved)
    want_out, expected = gradients_by_autograd(q, k, v, dout)
    assert relative_error(out, want_out) < 1e-12
    for gradient, want in zip(found, expected, strict=True):
        assert relative_error(gradient, want) < 1e-11


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("number", range(4))
def test_a_slice_attends_to_all_positions_up_to_its_own(number: int, deterministic: bool) -> None:
    agrees(sliced((2, 4, 2, 20, 8), 4, number, "cpu", torch.float64), deterministic, 1e-11)


def test_slices_give_what_the_whole_gives() -> None:
    q, k, v, dout = inputs((2, 4, 2, 12, 8), "cpu", torch.float64)
    whole, (_, dk, dv) = gradients_by_autograd(q, k, v, dout)
    sums = [torch.zeros_like(k), torch.zeros_like(v)]
    for start in (8, 4, 0):
        end = start + 4
        out, saved = attention(q[:, :, start:end], k[:, :, :end], v[:, :, :end])
        assert relative_error(out, whole[:, :, start:end]) < 1e-12
        for total, more in zip(sums, attention_backward(dout[:, :, start:end], saved)[1:], strict=True):
            total[:, :, :end] += more
    assert relative_error(sums[0], dk) < 1e-12
    assert relative_error(sums[1], dv) < 1e-12


def test_the_output_and_the_inputs_are_outside_any_graph() -> None:
    q, k, v, dout = inputs((1, 2, 2, 4, 8), "cpu", torch.float32)
    out, saved = attention(q, k, v)
    assert not out.requires_grad and not q.requires_grad
    assert all(not x.requires_grad for x in attention_backward(dout, saved))


def test_a_second_backward_is_refused() -> None:
    q, k, v, dout = inputs((1, 2, 2, 4, 8), "cpu", torch.float32)
    _, saved = attention(q, k, v)
    attention_backward(dout, saved)
    with pytest.raises(RuntimeError, match="second time"):
        attention_backward(dout, saved)


@pytest.mark.parametrize("number", range(4))
def test_the_way_of_fused_kernels_is_one_block_and_no_graph(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    monkeypatch.setattr(kernel, "is_fused", lambda q, v: True)
    given = sliced((2, 4, 2, 20, 8), 4, number, "cpu", torch.float64)
    agrees(given, True, 1e-11)
    _, saved = attention(given[0], given[1], given[2], scale=0.3)
    assert saved.lse is not None and saved.out.grad_fn is None


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("shape", [(2, 4, 4, 7, 64), (1, 8, 2, 257, 128), (2, 8, 8, 1024, 64)])
def test_fused_attention_agrees_with_its_definition(
    shape: Shape, deterministic: bool, dtype: torch.dtype, bound: float
) -> None:
    agrees(inputs(shape, "cuda", dtype), deterministic, bound)


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("shape", [(2, 4, 4, 28, 64), (1, 8, 2, 516, 128), (2, 8, 8, 2048, 64)])
@pytest.mark.parametrize("number", range(4))
def test_fused_attention_of_a_slice_agrees_with_its_definition(
    shape: Shape, number: int, deterministic: bool, dtype: torch.dtype, bound: float
) -> None:
    agrees(sliced(shape, 4, number, "cuda", dtype), deterministic, bound)


@pytest.mark.gpu
@pytest.mark.parametrize("slices", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_deterministic_attention_is_bit_equal_from_run_to_run(dtype: torch.dtype, slices: int) -> None:
    q, k, v, dout = sliced((2, 8, 2, 2048, 128), slices, slices - 1, "cuda", dtype)
    first_out, saved = attention(q, k, v, deterministic=True)
    first = attention_backward(dout, saved)
    for _ in range(5):
        out, saved = attention(q, k, v, deterministic=True)
        assert torch.equal(out, first_out)
        assert all(torch.equal(a, b) for a, b in zip(first, attention_backward(dout, saved), strict=True))
    assert torch.get_deterministic_debug_mode() == 0
