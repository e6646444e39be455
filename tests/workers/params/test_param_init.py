"""Initial parameter values: any part of a tensor by itself, a normal distribution, independence, stable bits."""

from __future__ import annotations

import pytest
import torch

from pentad.schedules.spec.tensors import Tensor
from pentad.workers.params.param_init import initial_values

LARGE = Tensor("layers.3.mlp.down", (512, 1024), 0.02)


def test_any_part_is_that_of_the_full_tensor() -> None:
    full = initial_values(Tensor("a", (7, 6, 5), 0.5), 3)
    ranges = [[(1, 2), (4, 7)], [(0, 6)], [(2, 3), (4, 5)]]
    rows = torch.cat([full[1:2], full[4:7]])
    assert torch.equal(initial_values(Tensor("a", (7, 6, 5), 0.5), 3, ranges), rows[:, :, [2, 4]])


def test_values_are_normally_distributed() -> None:
    values = initial_values(LARGE, 0).double() / 0.02
    assert values.mean().item() == pytest.approx(0, abs=0.005)
    assert values.std().item() == pytest.approx(1, abs=0.005)
    assert values.pow(4).mean().item() == pytest.approx(3 - 0.15, abs=0.05)
    for distance, share in ((0.5, 0.3829), (1, 0.6827), (2, 0.9545), (3, 0.9973)):
        assert (values.abs() < distance).double().mean().item() == pytest.approx(share, abs=0.006)


def test_neighbours_names_and_seeds_are_uncorrelated() -> None:
    values = initial_values(LARGE, 0) / 0.02
    others = [initial_values(LARGE, 1) / 0.02, initial_values(LARGE._replace(name="layers.4.mlp.down"), 0) / 0.02]
    pairs = [(values[:, 1:], values[:, :-1]), (values[1:], values[:-1]), *((values, other) for other in others)]
    for one, other in pairs:
        assert (one * other).mean().item() == pytest.approx(0, abs=0.006)


def test_tied_copies_are_equal_and_norms_are_ones() -> None:
    one, copy = Tensor("embedding", (4, 4), 0.02), Tensor("head", (4, 4), 0.02, tied_to="embedding")
    assert torch.equal(initial_values(one, 5), initial_values(copy, 5))
    assert torch.equal(initial_values(Tensor("norm", (9,), 0.0), 5), torch.ones(9))


EXPECTED = [
    -1.4789594411849976, -0.2928055226802826, -0.35186001658439636,
    -0.2510562539100647, -1.3543283939361572, -0.9964134097099304,
]  # fmt: skip


def test_the_bits_never_change() -> None:
    """A run can always be repeated from its seed."""
    found = initial_values(Tensor("embedding", (2, 3), 1.0), 7).flatten().tolist()
    assert found == EXPECTED
