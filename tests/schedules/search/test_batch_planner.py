"""Plans of a batch hold every sequence once and are near the best that an exhaustive search finds."""

from __future__ import annotations

from itertools import chain, pairwise, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pentad.schedules.search.batch_planner import balanced


@given(sizes=st.tuples(*[st.integers(1, 5)] * 3), seed=st.integers(0, 2**31))
def test_every_sequence_is_in_one_microbatch_and_similar_ones_follow_each_other(
    sizes: tuple[int, int, int], seed: int
) -> None:
    rows, microbatches, replicas = sizes
    seconds = np.random.default_rng(seed).lognormal(size=rows * microbatches * replicas)
    plan = balanced(seconds, rows, replicas)
    assert sorted(plan.order) == list(range(len(seconds)))
    assert [len(parts) for parts in plan.replicas] == [microbatches] * replicas
    assert {len(part) for part in chain(*plan.replicas)} == {rows}
    for parts, work in zip(plan.replicas, plan.balance.work, strict=True):
        each = [seconds[[*part]].sum() for part in parts]
        assert sum(each) == pytest.approx(work)
        assert all(first >= second - 1e-12 for first, second in pairwise(each))
    assert plan.balance.end == plan.balance.work.max() >= plan.balance.bound * (1 - 1e-12)
    assert plan.replicas == balanced(seconds, rows, replicas).replicas, "the same costs, the same plan"


@given(seconds=st.lists(st.floats(0.1, 10.0), min_size=8, max_size=8))
def test_a_plan_is_within_the_bound_of_the_method_of_the_best(seconds: list[float]) -> None:
    """Graham: longest first takes at most 4/3 - 1/(3 n) times the best for n replicas; also of plans with equally many
    sequences on each."""
    replicas, work = 2, np.array(seconds)
    best = min(
        max(work[np.array(place) == each].sum() for each in range(replicas))
        for place in product(range(replicas), repeat=len(seconds))
        if sum(place) * 2 == len(seconds)
    )
    balance = balanced(work, 1, replicas).balance
    assert balance.bound <= best * (1 + 1e-12)
    assert best * (1 - 1e-12) <= balance.end <= best * (4 / 3 - 1 / 6 + 1e-12)
