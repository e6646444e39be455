"""The candidate chosen is the one that completing all would choose, and no bound exceeds the time of its candidate."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pentad.schedules.catalogue import generate
from pentad.schedules.generators import v_blocks, zb_auto
from pentad.schedules.generators.best_of import Candidate, best_of
from pentad.schedules.generators.zb_auto_greedy import GreedyOptions, Pipeline, Run, followed, run_greedy
from pentad.schedules.simulate.costs import Costs
from pentad.schedules.spec.schedule_spec import ScheduleOptions

MODULES = {"v-min": v_blocks, "v-half": v_blocks, "zb-1p": zb_auto, "zb-2p": zb_auto}


@st.composite
def costs_of(draw: st.DrawFn, stages: int) -> Costs:
    """Small integers, with which candidates often tie, or any numbers."""
    each = draw(st.sampled_from([st.integers(1, 3).map(float), st.floats(0.01, 10)]))
    of_stages = st.tuples(*[each] * stages)
    return Costs(draw(of_stages), draw(of_stages), draw(of_stages), transfer=draw(st.sampled_from([0.0, 0.3, 1.0])))


def all_completed(
    candidates: Iterable[Candidate[Any]], key: Callable[[Any], tuple[float, ...]], rounding: float = 0.0
) -> Any:
    found = [*map(_completed, candidates)]
    for bounds, result in found:
        assert max(bounds, default=0.0) <= key(result)[0] + rounding
    return min((result for _, result in found), key=key)


def _completed(candidate: Candidate[Any]) -> tuple[list[float], Any]:
    bounds = list[float]()
    while True:
        try:
            bounds.append(next(candidate))
        except StopIteration as end:
            return bounds, end.value


@pytest.mark.parametrize("name", MODULES)
@given(data=st.data())
def test_the_best_is_the_one_that_completing_all_candidates_finds(name: str, data: st.DataObject) -> None:
    module, ranks, microbatches = MODULES[name], data.draw(st.integers(1, 6)), data.draw(st.integers(1, 40))
    costs = data.draw(costs_of(ranks * (2 if module is v_blocks else 1)))
    limit = data.draw(st.sampled_from([None, 1, 2.5, 4])) if module is zb_auto else None
    options = ScheduleOptions(memory_limit=limit)
    found = generate(name, ranks, microbatches, options, costs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "best_of", all_completed)
        patch.setattr(zb_auto, "greedy_candidates", each_greedy_one_alone)
        patch.setattr(zb_auto, "list_candidates", each_list_schedule_alone)
        assert generate(name, ranks, microbatches, options, costs).hash == found.hash


def each_greedy_one_alone(begin: Callable[[], Pipeline], *, extra_warm_up: bool) -> Iterator[Candidate[Pipeline]]:
    """The greedy candidates, each with a run of its own."""
    for options in product((False, True), repeat=2):
        yield alone(Run(begin(), partial(run_greedy, options=GreedyOptions(extra_warm_up, *options))))


def each_list_schedule_alone(begin: Callable[[], Pipeline], *, backward_first: bool) -> Iterator[Candidate[Pipeline]]:
    """The list schedules, likewise."""
    for eager in (False, True):
        steps = partial(zb_auto.list_schedule, backward_first=backward_first, eager_weight=eager)
        yield alone(Run(begin(), steps))


def alone(run: Run) -> Candidate[Pipeline]:
    return followed(lambda: run)


def test_a_candidate_that_cannot_be_the_best_is_not_completed() -> None:
    ended = list[str]()

    def candidate(name: str, bounds: list[float], seconds: float) -> Candidate[float]:
        yield from bounds
        ended.append(name)
        return seconds

    runs = [candidate("slow", [1.0, 5.0], 6.0), candidate("fast", [2.0, 3.0], 4.0), candidate("equal", [4.0], 4.0)]
    assert best_of(runs, lambda seconds: (seconds,)) == 4.0
    assert ended == ["fast", "equal"]
