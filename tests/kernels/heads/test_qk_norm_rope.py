"""Heads are normed and rotated in one pass, with the result of a norm followed by a rotation."""

from __future__ import annotations

import pytest
import torch
from closeness import relative_error
from torch import Tensor

from pentad.kernels.attention.rope import rope_
from pentad.kernels.attention.rope_tables import rope_tables
from pentad.kernels.heads.qk_norm_rope import norm_and_rotate_, norm_and_rotate_backward_
from pentad.kernels.rms_norm import rms_norm

# Tokens, positions, heads, head dim: a tile and its rest, sequences, a single head, halves that are no power of two.
SHAPES = [(1, 1, 1, 8), (14, 7, 3, 40), (45, 45, 4, 64)]


def operands(shape: tuple[int, int, int, int], device: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """(heads, their weight, gradients); heads and gradients are slices of larger tensors."""
    tokens, _, heads, width = shape
    x, dx = torch.randn(2, tokens, heads + 2, width, device=device, dtype=dtype)
    return x[:, 1:-1], torch.randn(width, device=device, dtype=dtype), dx[:, 1:-1]


@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_are_those_of_autograd(shape: tuple[int, int, int, int]) -> None:
    x, weight, dx = operands(shape, "cpu", torch.float64)
    cos, sin = rope_tables(shape[1], shape[3], 1e4, "cpu", torch.float64)
    leaves = [each.detach().clone().requires_grad_() for each in (x, weight)]
    normed = torch.nn.functional.rms_norm(leaves[0], (shape[3],), eps=1e-5) * (leaves[1] + 0.5)
    at = torch.arange(shape[0]) % shape[1]
    c, s, (a, b) = cos[at][:, None], sin[at][:, None], normed.chunk(2, dim=2)
    expected = torch.cat((a * c - b * s, b * c + a * s), dim=2)
    gradients = torch.autograd.grad(expected, leaves, dx.clone())
    saved = norm_and_rotate_(x, weight, 1e-5, cos, sin, 0.5)
    assert relative_error(x, expected.detach()) < 1e-13
    dweight = norm_and_rotate_backward_(dx, saved[0], weight, saved[1], cos, sin, 0.5)
    assert relative_error(dx, gradients[0]) < 1e-12 and relative_error(dweight, gradients[1]) < 1e-12


def both(x: Tensor, weight: Tensor, dx: Tensor, cos: Tensor, sin: Tensor, norm: object, back: object) -> list[Tensor]:
    """The results of `norm` and `back` on copies of the operands."""
    x, dx = (
        torch.empty_strided(x.shape, x.stride()).to(x).copy_(x),
        torch.empty_strided(dx.shape, dx.stride()).to(dx).copy_(dx),
    )
    rows, rstd = norm(x, weight, 1e-5, cos, sin, 1.0)  # type: ignore[operator]
    return [x, rows, rstd, back(dx, rows, weight, rstd, cos, sin, 1.0), dx]  # type: ignore[operator]


@pytest.mark.usefixtures("fresh_memory_holds_nan", "interpreter")
@pytest.mark.skipif(torch.cuda.is_available(), reason="runs without a GPU")
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("programs", [2, 264])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_kernels_in_triton(
    shape: tuple[int, int, int, int], programs: int, dtype: torch.dtype, bound: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    triton = pytest.importorskip("pentad.kernels.heads.qk_norm_rope_triton")
    monkeypatch.setattr(triton, "PROGRAMS", programs)
    x, weight, dx = operands(shape, "cpu", dtype)
    angles, wide = (
        rope_tables(shape[1], shape[3], 1e4, "cpu"),
        rope_tables(shape[1], shape[3], 1e4, "cpu", torch.float64),
    )
    found = both(x, weight, dx, *angles, triton.norm_and_rotate_, triton.norm_and_rotate_backward_)
    exact = both(x.double(), weight.double(), dx.double(), *wide, norm_and_rotate_, norm_and_rotate_backward_)
    for a, b in zip(found, exact, strict=True):
        assert relative_error(a, b) < bound


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(8192, 4096, 36, 128), (4100, 2050, 5, 64)])
def test_on_a_gpu_it_agrees_with_a_norm_and_a_rotation(shape: tuple[int, int, int, int]) -> None:
    x, weight, dx = operands(shape, "cuda", torch.bfloat16)
    angles = rope_tables(shape[1], shape[3], 1e4, "cuda")
    normed, _, rstd = rms_norm(x.reshape(-1, shape[3]), weight, 1e-5, None, 1.0)
    expected = normed.view(x.shape)
    rope_(expected, *angles)
    found, again = (both(x, weight, dx, *angles, norm_and_rotate_, norm_and_rotate_backward_) for _ in range(2))
    assert relative_error(found[0], expected) < 1e-3 and relative_error(found[2], rstd) < 1e-6
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))
    wide = rope_tables(shape[1], shape[3], 1e4, "cuda", torch.float64)
    exact = both(x.double(), weight.double(), dx.double(), *wide, norm_and_rotate_, norm_and_rotate_backward_)
    assert all(relative_error(a, b) < 1e-2 for a, b in zip(found, exact, strict=True))
