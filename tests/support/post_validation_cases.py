"""What test_post_validation.py shares with other tests."""

from __future__ import annotations

import math

import torch


def agree(ahead, barrier) -> None:
    for a, b in zip(ahead, barrier, strict=True):
        assert [r.step for r in a.results] == [r.step for r in b.results]
        assert [r.losses for r in a.results] == [r.losses for r in b.results]
        assert [r.skipped for r in a.results] == [r.skipped for r in b.results]
        norms = [(x.grad_norm, y.grad_norm) for x, y in zip(a.results, b.results, strict=True)]
        assert all(x == y or (math.isnan(x) and math.isnan(y)) for x, y in norms)
        assert a.state.keys() == b.state.keys()
        assert all(torch.equal(a.state[name], b.state[name]) for name in a.state)
