"""Plans of a batch hold every document once, within capacity, near the best that an exhaustive search finds."""

from __future__ import annotations

import time
from collections import Counter
from itertools import chain, combinations, pairwise, permutations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pentad.schedules.ir.errors import PentadError
from pentad.schedules.search.batch_planner import DocumentCosts, DynamicPlan, dynamic, fixed, packed

CAPACITY = 64
COSTS = DocumentCosts(1e-3, 1e-2, 1e-3)
LENGTHS = st.lists(st.integers(0, CAPACITY), max_size=30)


@given(lengths=LENGTHS, replicas=st.integers(1, 5), method=st.sampled_from([fixed, packed]))
def test_every_document_is_in_one_microbatch_that_holds_it(lengths: list[int], replicas: int, method) -> None:
    plan = method(lengths, CAPACITY, replicas, COSTS)
    assert len(plan.replicas) == replicas and len({len(parts) for parts in plan.replicas}) == 1
    parts = [*chain(*plan.replicas)]
    assert sorted(chain(*parts)) == list(range(len(lengths)))
    assert all(sum(lengths[document] for document in part) <= CAPACITY for part in parts)
    balance = plan.balance
    assert balance.work.sum() == pytest.approx(COSTS.alone(lengths).sum())
    assert balance.end == balance.work.max() >= balance.bound * (1 - 1e-12)
    assert plan.replicas == method(lengths, CAPACITY, replicas, COSTS).replicas, "the same lengths, the same plan"


@given(lengths=LENGTHS, replicas=st.integers(1, 5))
def test_similar_microbatches_follow_each_other(lengths: list[int], replicas: int) -> None:
    seconds = COSTS.alone(lengths)
    for parts in packed(lengths, CAPACITY, replicas, COSTS).replicas:
        work = [sum(seconds[document] for document in part) for part in parts]
        assert all(first >= second - 1e-12 for first, second in pairwise(work))


@settings(deadline=None)
@given(lengths=st.lists(st.integers(0, 5 * CAPACITY), max_size=30), ranks=st.integers(5, 9))
def test_every_document_is_on_ranks_that_hold_it(lengths: list[int], ranks: int) -> None:
    plan = dynamic(lengths, CAPACITY, ranks, COSTS)
    assert sorted(task.document for task in plan.tasks) == list(range(len(lengths)))
    for document, chosen in plan.tasks:
        assert len(set(chosen)) == len(chosen) and set(chosen) <= set(range(ranks))
        assert lengths[document] <= CAPACITY * len(chosen)
    assert plan.balance.end == pytest.approx(end_of(lengths, plan, ranks))
    assert plan.balance.end >= plan.balance.bound * (1 - 1e-9)
    assert plan.tasks == dynamic(lengths, CAPACITY, ranks, COSTS).tasks


def end_of(lengths: list[int], plan: DynamicPlan, ranks: int) -> float:
    """When the last rank ends, where a document starts once all of its ranks are free."""
    free = [0.0] * ranks
    for document, chosen in plan.tasks:
        length, count = lengths[document], len(chosen)
        seconds = (COSTS.quadratic * length**2 + COSTS.linear * length + COSTS.ring * length * (count - 1)) / count
        end = max(free[rank] for rank in chosen) + seconds
        for rank in chosen:
            free[rank] = end
    return max(free)


@settings(max_examples=40, deadline=None)
@given(lengths=st.lists(st.integers(1, CAPACITY), min_size=1, max_size=7))
def test_balanced_packing_is_within_the_bound_of_the_method_of_the_best(lengths: list[int]) -> None:
    """Graham: longest first ends within 4/3 - 1/(3 n) of the best, where nothing but work decides."""
    seconds, replicas = COSTS.alone(lengths), 2
    best = min(
        max(sum(seconds[d] for d, at in enumerate(place) if at == each) for each in range(replicas))
        for place in product(range(replicas), repeat=len(lengths))
    )
    plan = packed(lengths, 8 * CAPACITY, replicas, COSTS)
    assert plan.balance.bound <= best * (1 + 1e-12)
    assert best * (1 - 1e-12) <= plan.balance.end <= best * (4 / 3 - 1 / 6 + 1e-12)


@settings(max_examples=15, deadline=None)
@given(lengths=st.lists(st.integers(1, 2 * CAPACITY), min_size=1, max_size=3))
def test_no_bound_is_above_the_best_of_all_groupings(lengths: list[int]) -> None:
    ranks = 3
    groups = [group for count in (1, 2, 3) for group in combinations(range(ranks), count)]
    best = np.inf
    for order in permutations(range(len(lengths))):
        for chosen in product(groups, repeat=len(lengths)):
            if all(lengths[d] <= CAPACITY * len(group) for d, group in zip(order, chosen, strict=True)):
                tasks = zip(order, chosen, strict=True)
                best = min(best, end_of(lengths, DynamicPlan(tuple(tasks), None), ranks))  # type: ignore[arg-type]
    balance = dynamic(lengths, CAPACITY, ranks, COSTS).balance
    assert balance.bound <= best * (1 + 1e-9)
    assert best * (1 - 1e-9) <= balance.end <= 2 * best


def test_three_ranks_share_what_two_cannot_hold() -> None:
    plan = dynamic([3 * CAPACITY, 10, 10], CAPACITY, 4, COSTS)
    assert Counter(len(task.ranks) for task in plan.tasks)[1] == 2 and 3 <= len(plan.tasks[0].ranks) <= 4


def test_256_documents_on_64_ranks_are_balanced_in_50_ms_of_cpu() -> None:
    random = np.random.default_rng(0)
    lengths = np.minimum(random.lognormal(np.log(1200), 1.3, 256), 131_072).astype(int).tolist()
    costs = DocumentCosts(1e-9, 1e-5, 1e-7)
    times = []
    for _ in range(5):
        since = time.process_time()
        plan = dynamic(lengths, 32_768, 64, costs)
        packed(lengths, 131_072, 64, costs)
        times.append(time.process_time() - since)
    assert plan.balance.gap < 0.03
    assert min(times) < 0.05


@pytest.mark.parametrize("method", [fixed, packed])
def test_a_document_that_fits_nowhere_is_refused(method) -> None:
    with pytest.raises(PentadError, match=r"^a document has 65 tokens: expected at most 64, what a microbatch holds"):
        method([3, 65], CAPACITY, 2, COSTS)
    with pytest.raises(PentadError, match=r"^a document has 129 tokens: expected at most 128, what 2 ranks hold"):
        dynamic([129], CAPACITY, 2, COSTS)


def test_no_documents_are_no_work() -> None:
    assert packed([], CAPACITY, 2, COSTS).replicas == (((),), ((),))
    assert dynamic([], CAPACITY, 2, COSTS).tasks == ()
    assert dynamic([0, 0], CAPACITY, 4, COSTS).balance.max_over_mean == 1
