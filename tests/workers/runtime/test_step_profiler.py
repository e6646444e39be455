"""Chosen steps run under torch's profiler: with the same bits, a mark for every instruction, and no step lost by it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from bits import assert_same_runs
from plans import SHALLOW, plan_of

from pentad.schedules.ir.instruction import Op
from pentad.schedules.simulate.step_profile import ASYNC, INSTRUCTION, OPERATOR, ProfileEvent, unpack
from pentad.schedules.spec.plan import Plan
from pentad.workers.abort import Aborted
from pentad.workers.runtime import step_profiler
from pentad.workers.runtime.runner import Runner

pytestmark = pytest.mark.timeout(150)
STEPS, CHOSEN = 6, (1, 4)
SLACK = 5_000_000  # ns for which a busy host may not run between two readings of a clock
CASES = [
    ("zb-h2", {"pp": 2, "post_validation": True}, False),
    ("dualpipe", {"pp": 2}, False),
    pytest.param("1f1b", {"dp": 1}, True, marks=pytest.mark.slow),
    pytest.param("1f1b", {"dp": 2, "tp": 2}, False, marks=pytest.mark.slow),
]


def profiles_of(results: list) -> dict[int, tuple[ProfileEvent, ...]]:
    return {each.step: unpack(each.profile.data) for each in results if each.profile is not None}


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("name", "axes", "graphs"), CASES)
def test_profiled_steps_have_the_same_bits_and_a_mark_for_every_instruction(fleet, corpus, name, axes, graphs):
    """A step that is rolled back also has the marks of what it did before."""
    plan = plan_of(**{"name": name, "dp": 1, "pp": 1, "microbatches": 4, "data": corpus, "model": SHALLOW, **axes})
    plan, calls = replace(plan, cuda_graphs=graphs), [(0, 3, True), (3, 3)]
    profiled = fleet.run(replace(plan, profile_steps=CHOSEN), calls)
    assert_same_runs(profiled, fleet.run(plan, calls))
    for rank, outcome in enumerate(profiled):
        found = profiles_of(outcome.results)
        assert tuple(found) == CHOSEN
        stream = plan.program.streams[plan.mesh.coordinates(rank).pp]
        expected = ["+".join(str(part.key) for part in action.parts) for action in stream]
        for step, events in found.items():
            marks = [event for event in events if event.kind == INSTRUCTION]
            assert all(mark.name == mark.instruction for mark in marks)
            before, names = len(marks) - len(expected), [mark.name for mark in marks]
            assert names[before:] == expected and names[:before] == expected[:before]
            assert not before or stream[before - 1].key.op is Op.ROLLBACK
            assert_on_the_clock_of_spans(marks[before:], outcome.results[step].spans)
            products = {event.op for event in events if event.name in ("aten::mm", "aten::addmm", "aten::addmm_")}
            assert any("F" in op for op in products) and any("B" in op or "W" in op for op in products)


def assert_on_the_clock_of_spans(marks: list[ProfileEvent], spans: tuple) -> None:
    """The time that a span covers is within that of its instruction's mark."""
    at = {name: mark for mark in marks for name in mark.name.split("+")}
    compute = [span for span in spans if span.lane == "compute"]
    assert compute
    for span in compute:
        mark = at[span.name]
        assert mark.start - SLACK < 1e9 * span.start <= 1e9 * span.end < mark.end + SLACK


@pytest.fixture
def plan(corpus: str) -> Plan:
    return replace(plan_of("1f1b", 1, 1, 2, corpus, model=SHALLOW), profile_steps=CHOSEN)


@pytest.fixture
def begin(tmp_path: Path) -> Callable[..., Runner]:
    """Starts a generation of a rank in this process."""

    def make(plan: Plan, generation: int = 1, previous: Runner | None = None) -> Runner:
        runner = Runner(plan, 0, tmp_path / "progress", generation, previous=previous)
        runner.connect(runner.serve("127.0.0.1", 30), 30)
        if previous is None:
            runner.restore(None)
        return runner

    return make


@contextmanager
def closing(runner: Runner) -> Iterator[Runner]:
    try:
        yield runner
    finally:
        runner.close()


def is_profiling() -> bool:
    return step_profiler._in_use.locked() or torch.autograd.profiler._is_profiler_enabled


def test_operators_belong_to_the_instruction_that_called_them(begin, plan):
    with closing(begin(plan)) as runner:
        (events,) = profiles_of(runner.run(1, 1)).values()
    marks = {event.instruction: event for event in events if event.kind == INSTRUCTION}
    operators = [event for event in events if event.kind == OPERATOR]
    assert len(operators) > 100 and all(event.name != INSTRUCTION for event in operators)
    for event in events:
        if event.kind != ASYNC and event.instruction:
            mark = marks[event.instruction]
            assert mark.start <= event.start and event.end <= mark.end, event


def test_steps_that_are_not_chosen_run_without_a_profiler(begin, plan, monkeypatch):
    def refuse(*_: object) -> None:
        raise AssertionError("a profiler was made")

    monkeypatch.setattr(step_profiler, "_Recording", refuse)
    with closing(begin(plan)) as runner:
        assert [each.profile for each in runner.run(2, 2)] == [None, None]


@pytest.mark.parametrize("method", ["__enter__", "__exit__", "no marks", "in use"])
def test_a_profiler_that_fails_costs_no_step(begin, plan, monkeypatch, method):
    with closing(begin(plan)) as runner:
        expected = [each.losses for each in runner.run(0, 3)]
    match method:
        case "no marks":
            monkeypatch.setattr(step_profiler._Recording, "marked", lambda self, run_action: run_action)
        case "in use":
            assert step_profiler._in_use.acquire(blocking=False)
        case _:
            real = getattr(torch.autograd.profiler.profile, method)

            def fail(self: Any, *arguments: Any) -> None:
                if method == "__exit__":
                    real(self, *arguments)
                raise RuntimeError("CUPTI is\n  in use")

            monkeypatch.setattr(torch.autograd.profiler.profile, method, fail)
    try:
        with closing(begin(plan)) as runner:
            results = runner.run(0, 3)
    finally:
        if method == "in use":
            step_profiler._in_use.release()
    assert [each.losses for each in results] == expected
    problem = {
        "no marks": "torch's profiler saw 0 of 0 instructions",
        "in use": "a profiler of an earlier generation is still running",
    }.get(method, "CUPTI is in use")
    assert [each.profile and (each.profile.problem, each.profile.data) for each in results] == [
        None,
        (problem, b""),
        None,
    ]
    assert not is_profiling()


def test_the_end_of_a_generation_in_a_profiled_step_leaves_no_profiler(begin, plan):
    runner = begin(plan)
    assert runner.executor is not None
    asked, check = 0, runner.executor.check

    def ending() -> None:
        nonlocal asked
        if torch.autograd.profiler._is_profiler_enabled:
            asked += 1
        if asked == 3:
            runner.fence()
        check()

    runner.executor.check = ending
    with pytest.raises(Aborted):
        runner.run(1, 1)
    assert asked >= 3 and not is_profiling()
    runner.leave()
    with closing(begin(plan, 2, runner)) as again:
        assert list(profiles_of(again.run(1, 1))) == [1]


def test_a_profile_has_a_bounded_number_of_events(begin, plan, monkeypatch):
    monkeypatch.setattr(step_profiler, "MOST_EVENTS", 50)
    with closing(begin(plan)) as runner:
        (result,) = runner.run(1, 1)
    assert result.profile is not None
    events = unpack(result.profile.data)
    assert len(events) == 50 and result.profile.left_out > 50
    stream = plan.program.streams[0]
    assert sum(event.kind == INSTRUCTION for event in events) == len(stream)
