"""Bit-identical tensors and runs."""

from __future__ import annotations

import math

import torch


def same_bits(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def assert_same_runs(one, other) -> None:
    """Asserts the same steps, losses, norms and final states on every rank."""
    for a, b in zip(one, other, strict=True):
        assert [r.step for r in a.results] == [r.step for r in b.results]
        assert [r.losses for r in a.results] == [r.losses for r in b.results]
        assert [r.skipped for r in a.results] == [r.skipped for r in b.results]
        norms = [(x.grad_norm, y.grad_norm) for x, y in zip(a.results, b.results, strict=True)]
        assert all(x == y or (math.isnan(x) and math.isnan(y)) for x, y in norms)
        assert same_bits(a.state, b.state)
