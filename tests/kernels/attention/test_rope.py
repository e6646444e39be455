"""Rotary embedding: the reference against complex multiplication, and Triton against the reference on a GPU."""

import pytest
import torch
from closeness import relative_error
from torch import Tensor

from pentad.kernels.attention.rope import rope_
from pentad.kernels.attention.rope_tables import rope_tables


def rotated_by_complex_numbers(x: Tensor, theta: float, length: int) -> Tensor:
    half = x.shape[2] // 2
    position = torch.arange(x.shape[0], dtype=torch.float64) % length
    angle = position[:, None] / theta ** (torch.arange(half, dtype=torch.float64) / half)
    rotated = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angle), angle)[:, None]
    return torch.cat((rotated.real, rotated.imag), dim=-1)


@pytest.mark.parametrize("tokens", [6, 12])
def test_the_reference_multiplies_by_complex_numbers(tokens: int) -> None:
    x = torch.randn(tokens, 3, 8, dtype=torch.float64)
    cos, sin = rope_tables(6, 8, 500.0, "cpu", torch.float64)
    expected = rotated_by_complex_numbers(x, 500.0, 6)
    rope_(x, cos, sin)
    assert relative_error(x, expected) < 1e-13


def test_the_inverse_rotates_back() -> None:
    x = torch.randn(5, 2, 8, dtype=torch.float64)
    before = x.clone()
    cos, sin = rope_tables(5, 8, 10000.0, "cpu", torch.float64)
    rope_(x, cos, sin)
    assert not torch.allclose(x, before)
    rope_(x, cos, sin, inverse=True)
    assert torch.allclose(x, before, atol=1e-14, rtol=0)


def test_the_inverse_is_the_gradient() -> None:
    x, dy = torch.randn(2, 5, 2, 8, dtype=torch.float64)
    x.requires_grad_()
    (rotated_by_complex_numbers(x, 100.0, 5) * dy).sum().backward()
    cos, sin = rope_tables(5, 8, 100.0, "cpu", torch.float64)
    rope_(dy, cos, sin, inverse=True)
    assert x.grad is not None and relative_error(dy, x.grad) < 1e-13


def test_only_the_given_slice_of_a_packed_projection_is_rotated() -> None:
    packed = torch.randn(4, 6, 8, dtype=torch.float64)
    before = packed.clone()
    cos, sin = rope_tables(4, 8, 10000.0, "cpu", torch.float64)
    rope_(packed[:, :4], cos, sin)
    assert relative_error(packed[:, :4], rotated_by_complex_numbers(before[:, :4], 10000.0, 4)) < 1e-13
    assert torch.equal(packed[:, 4:], before[:, 4:])


@pytest.mark.sampled(11)
@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("head_dim", [2, 64, 80, 128, 256])
@pytest.mark.parametrize(("tokens", "length"), [(1, 1), (7, 7), (257, 257), (4096, 2048)])
def test_triton_agrees_with_the_reference(
    tokens: int, length: int, head_dim: int, inverse: bool, dtype: torch.dtype, bound: float
) -> None:
    packed = torch.randn(tokens, 15, head_dim, device="cuda", dtype=dtype)
    expected = packed.double()
    rope_(expected[:, :11], *rope_tables(length, head_dim, 1e4, "cuda", torch.float64), inverse)
    again = packed.clone()
    cos, sin = rope_tables(length, head_dim, 1e4, "cuda")
    rope_(packed[:, :11], cos, sin, inverse)
    rope_(again[:, :11], cos, sin, inverse)
    assert relative_error(packed, expected) < bound
    assert torch.equal(packed[:, 11:].double(), expected[:, 11:])
    assert torch.equal(packed, again)
