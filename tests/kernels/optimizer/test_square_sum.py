"""The sum of squares: exact squares, added in float64, and so nearly the same however the elements are divided."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch

from pentad.kernels.optimizer.square_sum import PIECE, square_sum

each_device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


@each_device
@pytest.mark.parametrize("n", [0, 1, 5000, PIECE + 7, 3 * PIECE])
def test_it_is_within_1e_15_of_the_exact_sum(n: int, device: str) -> None:
    flat = torch.randn(n, generator=torch.Generator().manual_seed(n)) * torch.logspace(-6, 6, n)
    exact = sum((Fraction(each) ** 2 for each in flat[:5000].tolist()), Fraction())
    rest = flat[5000:].double().square().sum().item()
    assert square_sum(flat.to(device)).item() == pytest.approx(float(exact) + rest, rel=1e-15, abs=0)


@each_device
@pytest.mark.parametrize("parts", [2, 3, 17])
def test_its_root_has_the_same_float32_digits_in_any_parts(parts: int, device: str) -> None:
    flat = torch.randn(100_000, generator=torch.Generator().manual_seed(1)).to(device)
    sums = [square_sum(part) for part in flat.tensor_split(parts)]
    whole, of_parts = square_sum(flat), torch.stack(sums).sum()
    assert of_parts.item() == pytest.approx(whole.item(), rel=1e-15)
    assert torch.equal(of_parts.sqrt().float(), whole.sqrt().float())


@each_device
def test_a_number_that_is_not_finite_shows(device: str) -> None:
    flat = torch.ones(3 * PIECE // 2, device=device)
    for bad in (float("inf"), float("-inf"), float("nan")):
        flat[-1] = bad
        assert not square_sum(flat).isfinite()
