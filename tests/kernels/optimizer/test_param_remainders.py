"""float32 numbers in two parts: all bits are there, and steps are those of float32 tensors, in torch and in Triton."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from pentad.kernels.optimizer.adamw import adamw_, coefficients
from pentad.kernels.optimizer.muon import muon_, muon_coefficients
from pentad.kernels.optimizer.param_remainders import SplitFloat32, nearest

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
EDGES = (0, 0x8000, 0x3F808000, 0x3F818000, 0x3F807FFF, 0x7F7FFFFF, 0x7F800000, -(2**31), -0x800000, -0x407F8000, 1)


def any_numbers(count: int, device: str = "cpu") -> Tensor:
    """Numbers with random bits; the first ones are at the edges of rounding."""
    bits = torch.randint(-(2**31), 2**31, (count,), dtype=torch.int64).to(torch.int32)
    bits[: len(EDGES)] = torch.tensor(EDGES, dtype=torch.int32)
    return bits.view(torch.float32).to(device)


@pytest.mark.parametrize("device", DEVICES)
def test_every_number_comes_back_bit_by_bit(device: str) -> None:
    x = any_numbers(300_000, device)
    found = SplitFloat32.of(x)
    is_nan = x.isnan()
    assert is_nan.any()
    assert torch.equal(found.isnan(), is_nan)
    assert torch.equal(found.high.isnan(), is_nan)
    assert torch.equal(found.joined()[~is_nan].view(torch.int32), x[~is_nan].view(torch.int32))


def test_its_high_part_is_the_nearest_bfloat16() -> None:
    x = any_numbers(300_000)
    x = x[x.isfinite() & (x.abs() < 3e38)]
    found, rounded = SplitFloat32.of(x).high, x.bfloat16()
    assert torch.equal((found.double() - x).abs(), (rounded.double() - x).abs())
    is_tie = (x.view(torch.int32) & 0xFFFF) == 0x8000
    assert is_tie.any()
    assert torch.equal(found[~is_tie], rounded[~is_tie])
    assert (found[is_tie].abs().double() > x[is_tie].abs()).all()
    assert torch.equal(nearest(x, torch.bfloat16), found)
    assert torch.equal(nearest(x, torch.float64), x.double())


def test_views_write_through_and_everything_else_reads() -> None:
    x = torch.randn(6, 40)
    whole = SplitFloat32.of(x)
    assert (whole.dtype, whole.numel(), whole.nbytes, whole.element_size()) == (torch.float32, 240, 960, 4)
    flat = whole.view(-1)
    flat[40:80].zero_()
    for number, piece in enumerate(flat.split(100)):
        piece[:10].copy_(torch.full((10,), 1.5 + number))
    x.view(-1)[40:80] = 0
    for number in range(3):
        x.view(-1)[100 * number : 100 * number + 10] = 1.5 + number
    assert torch.equal(whole, x)
    assert torch.equal(whole * 2 - 1, x * 2 - 1)
    assert torch.equal(torch.empty_like(x).copy_(whole), x)
    assert torch.equal(torch.cat([whole, whole]), torch.cat([x, x]))
    assert torch.equal(flat.view(torch.int32), x.view(-1).view(torch.int32))
    first, second = flat.split([100, 140])
    first.zero_()
    second.copy_(torch.ones(140))
    assert torch.equal(whole.sum(), torch.tensor(140.0))


REFUSED = [lambda x: x.add_(1), lambda x: x[0], lambda x: x.t(), lambda x: x.unsqueeze(0), lambda x: x.normal_()]


@pytest.mark.parametrize("operation", REFUSED)
def test_what_would_write_a_copy_is_refused(operation: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(TypeError, match="would be of a copy"):
        operation(SplitFloat32.of(torch.randn(6, 40)))


def test_a_part_that_is_not_contiguous_is_not_written() -> None:
    whole = SplitFloat32.of(torch.randn(6, 40))
    assert not whole[:, 3:5].is_contiguous()
    with pytest.raises(RuntimeError, match="view size is not compatible"):
        whole[:, 3:5].zero_().copy_(torch.ones(6, 2))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scale", [1.0, 0.37, float("nan")])
@pytest.mark.parametrize("n", [1, 1023, 1024, 70_001])
def test_a_step_has_the_bits_of_float32_master_weights(n: int, scale: float, device: str) -> None:
    master, m, v, grad, direction = torch.randn(5, n, device=device)
    factor, out = torch.tensor([scale], device=device), nearest(master, torch.bfloat16)
    v = v.abs()
    parts = SplitFloat32.of(master)
    moments = m.clone(), v.clone()
    for number in range(1, 4):
        c = coefficients(3e-3, 0.9, 0.95, 1e-8, 0.1, number)
        adamw_(master, m, v, grad, out, factor, c)
        adamw_(parts, *moments, grad, None, factor, c)
        each = muon_coefficients(3e-3, 0.95, 0.1, 1.5, nesterov=True)
        muon_(master, m, grad, direction.bfloat16(), out, factor, each)
        muon_(parts, moments[0], grad, direction.bfloat16(), None, factor, each)
    assert torch.equal(parts, master)
    assert torch.equal(parts.high, out)
    assert torch.equal(m, moments[0])
    assert torch.equal(v, moments[1])
