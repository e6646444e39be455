"""Attention against a plain softmax in float64, on a GPU with the fused backends."""

import pytest
import torch
from closeness import relative_error
from dense_attention import dense_attention
from torch import Tensor

from pentad.kernels.attention import attention as attention_module
from pentad.kernels.attention.attention import attention, attention_backward

Shape = tuple[int, int, int, int, int]  # batch, query heads, key-value heads, positions, head dim


def inputs(shape: Shape, device: str, dtype: torch.dtype) -> list[Tensor]:
    """q, k, v and dout, as views of [B, S, heads, D], like those of a packed projection."""
    batch, heads, groups, length, width = shape
    counts = (heads, groups, groups, heads)
    return [torch.randn(batch, length, n, width, device=device, dtype=dtype).transpose(1, 2) for n in counts]


def slice_inputs(shape: Shape, slices: int, number: int, device: str, dtype: torch.dtype) -> list[Tensor]:
    """q and dout of one slice of the positions, k and v up to its end in buffers for all, [B, heads, S, D]."""
    batch, heads, groups, length, width = shape
    size = length // slices
    q, _, _, dout = inputs((batch, heads, groups, size, width), device, dtype)
    k, v = torch.randn(2, batch, groups, length, width, device=device, dtype=dtype)[:, :, :, : (number + 1) * size]
    return [q, k, v, dout]


def check(tensors: list[Tensor], deterministic: bool, bound: float) -> None:
    """Forward and backward against float64."""
    q, k, v, dout = tensors
    out, saved = attention(q, k, v, deterministic)
    gradients = attention_backward(dout, saved)
    expected_out, expected = reference_gradients(q.double(), k.double(), v.double(), dout.double())
    assert relative_error(out, expected_out) < bound
    for gradient, exact in zip(gradients, expected, strict=True):
        assert relative_error(gradient, exact) < bound


def reference_gradients(q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    q, k, v = leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    out = dense_attention(q, k, v)
    return out.detach(), torch.autograd.grad(out, leaves, dout)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("shape", [(2, 4, 4, 9, 8), (1, 6, 2, 17, 16), (1, 4, 1, 2, 8)])
def test_attention_agrees_with_the_reference(shape: Shape, deterministic: bool) -> None:
    q, k, v, dout = inputs(shape, "cpu", torch.float64)
    with torch.no_grad():
        out, saved = attention(q, k, v, deterministic)
        gradients = attention_backward(dout, saved)
    expected_out, expected = reference_gradients(q, k, v, dout)
    assert relative_error(out, expected_out) < 1e-12
    for gradient, exact in zip(gradients, expected, strict=True):
        assert relative_error(gradient, exact) < 1e-11


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("number", range(4))
def test_a_slice_attends_to_all_positions_up_to_its_end(number: int, deterministic: bool) -> None:
    check(slice_inputs((2, 4, 2, 20, 8), 4, number, "cpu", torch.float64), deterministic, 1e-11)


def test_slices_add_up_to_the_uncut_sequence() -> None:
    q, k, v, dout = inputs((2, 4, 2, 12, 8), "cpu", torch.float64)
    expected, (_, dk, dv) = reference_gradients(q, k, v, dout)
    sums = [torch.zeros_like(k), torch.zeros_like(v)]
    for start in (8, 4, 0):
        end = start + 4
        out, saved = attention(q[:, :, start:end], k[:, :, :end], v[:, :, :end])
        assert relative_error(out, expected[:, :, start:end]) < 1e-12
        for total, gradient in zip(sums, attention_backward(dout[:, :, start:end], saved)[1:], strict=True):
            total[:, :, :end] += gradient
    assert relative_error(sums[0], dk) < 1e-12
    assert relative_error(sums[1], dv) < 1e-12


def test_output_and_gradients_are_detached() -> None:
    q, k, v, dout = inputs((1, 2, 2, 4, 8), "cpu", torch.float32)
    out, saved = attention(q, k, v)
    assert not out.requires_grad and not q.requires_grad
    assert all(not x.requires_grad for x in attention_backward(dout, saved))


def test_a_second_backward_is_an_error() -> None:
    q, k, v, dout = inputs((1, 2, 2, 4, 8), "cpu", torch.float32)
    _, saved = attention(q, k, v)
    attention_backward(dout, saved)
    with pytest.raises(RuntimeError, match="second time"):
        attention_backward(dout, saved)


@pytest.mark.parametrize("number", range(4))
def test_the_path_of_fused_kernels_has_no_graph(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    monkeypatch.setattr(attention_module, "has_fused_kernel", lambda q, v: True)
    tensors = slice_inputs((2, 4, 2, 20, 8), 4, number, "cpu", torch.float64)
    check(tensors, True, 1e-11)
    _, saved = attention(tensors[0], tensors[1], tensors[2], scale=0.3)
    assert saved.lse is not None and saved.out.grad_fn is None


@pytest.mark.sampled(5)
@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("shape", [(2, 4, 4, 7, 64), (1, 8, 2, 257, 128), (2, 8, 8, 1024, 64)])
def test_fused_attention_agrees_with_the_reference(
    shape: Shape, deterministic: bool, dtype: torch.dtype, bound: float
) -> None:
    check(inputs(shape, "cuda", dtype), deterministic, bound)


@pytest.mark.sampled(7)
@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("shape", [(2, 4, 4, 28, 64), (1, 8, 2, 516, 128), (2, 8, 8, 2048, 64)])
@pytest.mark.parametrize("number", range(4))
def test_fused_attention_of_a_slice_agrees_with_the_reference(
    shape: Shape, number: int, deterministic: bool, dtype: torch.dtype, bound: float
) -> None:
    check(slice_inputs(shape, 4, number, "cuda", dtype), deterministic, bound)


@pytest.mark.gpu
@pytest.mark.parametrize("slices", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_deterministic_attention_is_bit_equal_from_run_to_run(dtype: torch.dtype, slices: int) -> None:
    q, k, v, dout = slice_inputs((2, 8, 2, 2048, 128), slices, slices - 1, "cuda", dtype)
    first_out, saved = attention(q, k, v, deterministic=True)
    first = attention_backward(dout, saved)
    for _ in range(5):
        out, saved = attention(q, k, v, deterministic=True)
        assert torch.equal(out, first_out)
        assert all(torch.equal(a, b) for a, b in zip(first, attention_backward(dout, saved), strict=True))
    assert torch.get_deterministic_debug_mode() == 0
