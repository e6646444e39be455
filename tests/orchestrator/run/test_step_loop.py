"""The calls that keep ranks busy, with a worker group that only lists its calls."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from listed_calls import HELD_OUT, Ranks, Run, loop_runner

from pentad.orchestrator.monitoring import event_bus
from pentad.orchestrator.monitoring.run_state import EvalView
from pentad.orchestrator.monitoring.runfolder import JOURNAL, METRICS
from pentad.orchestrator.records.json_lines import read_lines
from pentad.orchestrator.records.profiles import StepProfile, load_profile
from pentad.orchestrator.run.step_loop import CALLS_IN_FLIGHT, StepLoop
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.simulate.step_profile import ProfileEvent, RankProfile, pack
from pentad.workers.runtime.results import EvalResult, Evaluation, StepResult


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return loop_runner(tmp_path)


def runs(ranks: Ranks) -> list[tuple[int, int]]:
    return [(call[1], call[2]) for call in ranks.log if call[0] == "run" and call[2]]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("every", [0, 1, 4, 7])
@pytest.mark.parametrize("seconds", [0.01, 0.3, 5.0])
def test_every_step_runs_once_and_calls_end_where_checkpoints_are(run: Run, every: int, seconds: float) -> None:
    ranks, calls = run("run.steps=23", f"checkpoint.every={every}", seconds=seconds)
    steps = [step for first, count in runs(ranks) for step in range(first, first + count)]
    assert steps == list(range(23))
    assert calls.done == 23
    boundaries = [*(range(every, 23, every) if every else ()), 23]
    assert [call[1] for call in ranks.log if call[0] == "save"] == boundaries
    assert [call[1] for call in ranks.log if call[0] == "commit"] == boundaries
    assert ranks.log.index(("save", 23)) > max(k for k, call in enumerate(ranks.log) if call[0] == "run")


def test_calls_grow_from_one_step_to_about_a_second(run: Run) -> None:
    ranks, _ = run("run.steps=200", "eval.every=0", seconds=0.04)
    counts = [count for _, count in runs(ranks)]
    assert counts[:2] == [1, 1]
    assert max(counts) in (24, 25)
    assert all(later <= 4 * before for before, later in pairwise(counts))


def test_slow_steps_are_submitted_one_per_call(run: Run) -> None:
    ranks, _ = run("run.steps=6", seconds=3.0)
    assert runs(ranks) == [(step, 1) for step in range(6)]


def test_two_calls_are_in_flight(run: Run) -> None:
    ranks, _ = run("run.steps=30", "checkpoint.every=5")
    assert ranks.ahead == CALLS_IN_FLIGHT


def test_a_resumed_run_continues_at_its_step(run: Run) -> None:
    ranks, _ = run("run.steps=12", "checkpoint.every=5", first=10)
    assert runs(ranks)[0] == (10, 1)
    assert [call[1] for call in ranks.log if call[0] == "save"] == [12]


def test_an_interrupt_ends_the_run_after_the_steps_in_flight_with_a_checkpoint(run: Run) -> None:
    prepare = lambda ranks: ranks.at.update({20: lambda loop: loop.requests.stop()})  # noqa: E731
    ranks, calls = run("run.steps=1000", "checkpoint.every=100", prepare=prepare)
    assert 20 < calls.done < 40
    assert ranks.log[-2:] == [("save", calls.done), ("commit", calls.done)]


@pytest.mark.parametrize("leaving", [(), (1,)])
def test_a_regroup_starts_with_every_step_done_and_saved_if_a_rank_leaves_with_its_state(
    run: Run, leaving: tuple[int, ...]
) -> None:
    def change(calls: StepLoop) -> None:
        calls.leaving = leaving

    ranks, calls = run("run.steps=1000", prepare=lambda r: r.at.update({20: change}))
    assert 20 < calls.done == calls.submitted < 40
    saved = [("save", calls.done), ("commit", calls.done)] if leaving else []
    last = [("run", calls.done, 0, False), *saved]
    assert ranks.log[-len(last) :] == last and calls.saving.durable == (calls.done if leaving else 0)


@pytest.mark.parametrize("what", ["save", "commit"])
def test_a_regroup_without_a_checkpoint_is_one_all_the_same(run: Run, what: str) -> None:
    def change(calls: StepLoop) -> None:
        calls.leaving = (1,)

    def prepare(ranks: Ranks) -> None:
        ranks.at[20] = change
        ranks.broken |= {(what, step): PentadError("disk full") for step in range(20, 40)}

    _, calls = run("run.steps=1000", prepare=prepare)
    assert 20 < calls.done < 40 and calls.saving.durable == 0
    assert "disk full" in read_lines(calls.bus.folder.path / JOURNAL)[-1]["error"]


@pytest.mark.parametrize("at", [{}, {8: lambda loop: loop.requests.stop()}])
def test_a_run_without_a_checkpoint_at_its_end_has_those_by_steps(run: Run, at: dict) -> None:
    words = ("run.steps=12", "checkpoint.every=5", "checkpoint.at_end=false")
    ranks, calls = run(*words, prepare=lambda ranks: ranks.at.update(at))
    assert calls.done == 12 or at
    assert [call[1] for call in ranks.log if call[0] == "commit"] == [5, 10][: calls.done // 5]


def test_a_pause_starts_with_every_step_done_and_saves_nothing(run: Run) -> None:
    ranks, _ = run("run.steps=50", seconds=0.9, prepare=lambda r: r.at.update({20: lambda c: c.requests.pause()}))
    assert ranks.rests == 1
    (closed,) = (call[1] for call in ranks.log if call[0] == "run" and not call[2])
    assert 20 < closed < 25
    assert [call[1] for call in ranks.log if call[0] == "save"] == [50]


def test_the_last_step_of_a_call_stays_open_unless_something_else_follows(run: Run) -> None:
    """What closes it is an evaluation or the end, not a checkpoint."""
    ranks, _ = run("run.steps=12", "checkpoint.every=5", "eval.every=4", *HELD_OUT, seconds=3.0)
    assert [call[1] for call in ranks.log if call[0] == "run" and not call[3]] == [0, 3, 7, 11]


def evaluations(ranks: Ranks) -> list[int]:
    return [call[1] for call in ranks.log if call[0] == "evaluate"]


@pytest.mark.parametrize(
    ("every", "at_start", "expected"),
    [(5, "false", [5, 10, 12]), (4, "true", [0, 4, 8, 12]), (0, "false", [12]), (100, "true", [0, 12])],
)
def test_evaluations_are_after_every_so_many_steps_and_at_the_end(
    run: Run, every: int, at_start: str, expected: list[int]
) -> None:
    overrides = f"eval.every={every}", f"eval.at_start={at_start}", "checkpoint.every=5"
    ranks, calls = run("run.steps=12", *HELD_OUT, *overrides)
    assert evaluations(ranks) == expected
    assert [step for first, count in runs(ranks) for step in range(first, first + count)] == list(range(12))
    saved = [call[1] for call in ranks.log if call[0] == "save"]
    for step in {*expected} & {*saved}:
        assert ranks.log.index(("evaluate", step, False)) < ranks.log.index(("save", step))
    rows = calls.bus.folder.evaluations()
    assert [(row["step"], row["data"], row["loss"]) for row in rows] == [(step, "holdout", 1.0) for step in expected]
    view, measured = calls.bus.view, calls.history.eval_timeline
    assert (view.evaluations, view.next_evaluation) == ((EvalView("holdout", 12, 1.0),), None)
    assert measured.steps == tuple(expected[-calls.config.metrics.timeline_steps :]) and measured.ranks == (0, 1)


def test_the_time_of_an_evaluation_counts_for_no_step(run: Run) -> None:
    _, calls = run("run.steps=12", *HELD_OUT, "eval.every=2", seconds=0.5)
    rows = read_lines(calls.bus.folder.path / METRICS)
    assert [row["step_seconds"] for row in rows] == pytest.approx([0.5] * 12)


def test_a_resumed_run_evaluates_what_is_missing_only(run: Run) -> None:
    run("run.steps=8", *HELD_OUT, "eval.every=4")
    ranks, _ = run("run.steps=16", *HELD_OUT, "eval.every=4", first=8, metrics=False)
    assert evaluations(ranks) == [12, 16]


def test_a_run_that_stops_leaves_the_evaluation_to_the_next(run: Run) -> None:
    prepare = lambda ranks: ranks.at.update({3: lambda loop: loop.requests.stop()})  # noqa: E731
    ranks, calls = run("run.steps=100", *HELD_OUT, "eval.every=1", seconds=3.0, prepare=prepare)
    assert evaluations(ranks) == list(range(1, max(evaluations(ranks)) + 1))
    assert max(evaluations(ranks)) <= calls.done


def test_an_evaluation_that_only_ranks_know_of_is_recorded_once(run: Run) -> None:
    """Evaluations after unrecorded steps, and those recorded before, are not recorded."""
    kept = {step: Evaluation(step, (EvalResult("holdout", 80.0, 8, 1),), seconds=0.5) for step in (0, 2, 4, 9)}

    def prepare(ranks: Ranks) -> None:
        ranks.at.update({5: lambda loop: loop.add([], kept), 6: lambda loop: loop.add([], kept)})

    ranks, calls = run("run.steps=8", *HELD_OUT, "eval.every=8", "eval.at_start=true", seconds=3.0, prepare=prepare)
    assert evaluations(ranks) == [0, 8]
    rows = [(row["step"], row["loss"], row["seconds"]) for row in calls.bus.folder.evaluations()]
    assert rows == [(0, 1.0, 0.0), (2, 10.0, 0.5), (4, 10.0, 0.5), (8, 1.0, 0.0)]


def profiling(*profiles: RankProfile) -> Callable[[Ranks], None]:
    """Prepares the two ranks to report these profiles of step 3."""

    def prepare(ranks: Ranks) -> None:
        collect = ranks.collect

        def profiled(refs: list[tuple], *, tick: Any = None) -> list:
            found = collect(refs, tick=tick)
            if refs[0][0] != "run":
                return found
            pairs = zip(found, profiles, strict=True)
            return [[reported(step, rank, each) for step in steps] for rank, (steps, each) in enumerate(pairs)]

        def reported(step: StepResult, rank: int, profile: RankProfile) -> StepResult:
            spans = tuple(span._replace(rank=rank) for span in step.spans)
            return replace(step, spans=spans, profile=profile if step.step == 3 else None)

        ranks.collect = profiled  # type: ignore[method-assign]

    return prepare


def profile_events(folder: Path) -> list[dict[str, Any]]:
    rows = read_lines(folder / "quickstart" / "journal.jsonl")
    return [
        {key: value for key, value in row.items() if key != "time"}
        for row in rows
        if row["event"].startswith("profile")
    ]


def test_profiles_are_written_and_problems_are_events(run: Run, tmp_path: Path) -> None:
    data = pack([ProfileEvent("kernel", "gemm", "0F0", "F", 7, 10, 20)])
    run("run.steps=5", prepare=profiling(RankProfile(data), RankProfile(problem="CUPTI is in use")))
    at = {"generation": 0, "step": 3}
    assert profile_events(tmp_path) == [
        {"event": "profile", **at, "ranks": 2, "bytes": len(data)},
        {"event": "profile failed", **at, "ranks": [1], "error": "CUPTI is in use"},
    ]
    found = load_profile(tmp_path / "quickstart", 3)
    assert [len(events) for events in found.events.values()] == [1, 0] and found.timeline.steps == (3,)


def test_a_profile_that_cannot_be_written_ends_no_run(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(folder: Path, profile: StepProfile) -> None:
        raise PentadError("the disk is full")

    monkeypatch.setattr(event_bus, "save_profile", refuse)
    _, calls = run("run.steps=5", prepare=profiling(*[RankProfile(pack([]))] * 2))
    assert calls.done == 5
    expected = {"event": "profile failed", "generation": 0, "step": 3, "ranks": [0, 1], "error": "the disk is full"}
    assert profile_events(tmp_path) == [expected]
