"""The calls that keep ranks busy, tested with a worker group that only lists its calls."""

import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from small_checkpoint import save_small

from pentad.orchestrator.cluster.faults import WorkerError
from pentad.orchestrator.config.config import RunConfig, load
from pentad.orchestrator.monitoring.display import Display
from pentad.orchestrator.monitoring.event_bus import EventBus
from pentad.orchestrator.monitoring.run_state import ControlRequests, EvalView
from pentad.orchestrator.monitoring.runfolder import JOURNAL, METRICS, RunFolder, read_lines
from pentad.orchestrator.planning.planning import make_plan
from pentad.orchestrator.run import step_loop
from pentad.orchestrator.run.step_loop import CALLS_IN_FLIGHT, StepLoop
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.simulate.timeline import Span
from pentad.schedules.spec.plan import Plan
from pentad.workers.runtime.results import EvalResult, Evaluation, LossSum, StepResult, WrittenShards


class Ranks:
    """Answers calls at once, with steps of `seconds`; `waiting` is the largest number of calls in flight."""

    def __init__(self, plan: Plan, seconds: float) -> None:
        self.plan, self.seconds, self.now = plan, seconds, 0.0
        self.log: list[tuple] = []
        self.open: list[tuple] = []
        self.kept: list[StepResult] = []  # the result of the newest step while that is open
        self.actors: list = []
        self.generation, self.offsets, self.device_name = 1, (), ""
        self.skipped_batches: tuple[tuple[int, int], ...] = ()
        self.ahead = 0
        self.broken: dict[tuple, PentadError] = {}
        self.at: dict[int, Callable[[StepLoop], None]] = {}  # step -> what to do during it
        self.calls: StepLoop | None = None
        self.rests = 0
        self.at_rest: Callable[[StepLoop], None] = lambda calls: calls.requests.resume()
        self.pinned: list[tuple[int, ...]] = []  # what each commit keeps
        self.unfinished: set[str] = set()  # of a checkpoint
        self.slow: dict[int, float] = {}  # checkpoint -> seconds until it is written, for which somebody has to wait
        self.losses: dict[int, float] = {}  # of evaluations, else 1

    def _submit(self, *call: Any) -> list[tuple]:
        if call[0] == "evaluate":
            before = next((each for each in reversed(self.log) if each[0] == "run"), None)
            assert before is None or not before[-1], "a step is open, and no run follows"
        self.log.append(call)
        if call[0] in ("run", "evaluate"):
            self.open.append(call)
            self.ahead = max(self.ahead, len(self.open))
        return [call]

    def submit_run(self, first: int, count: int, *, more: bool = False) -> list[tuple]:
        return self._submit("run", first, count, more)

    def submit_save(self, folder: Path, step: int) -> list[tuple]:
        assert folder.name == f"step-{step:08d}"
        assert not self.unfinished, "one checkpoint at a time"
        self.unfinished.add("save")
        return self._submit("save", step)

    def submit_evaluate(self, step: int) -> list[tuple]:
        return self._submit("evaluate", step, False)

    def submit_commit(self, folder: Path, step: int, shards: list, keep: int, pinned: tuple[int, ...]) -> list[tuple]:
        assert [shard["of"] for shard in shards] == [0, 1]
        assert self.calls is None or self.calls.done >= step, "a checkpoint is of steps that are accounted for"
        self.unfinished.add("commit")
        self.pinned.append(pinned)
        save_small(folder, step)
        return self._submit("commit", step)

    def ping(self, tick: Any) -> None:
        assert not self.kept and not self.open
        self.rests += 1
        assert self.calls is not None
        self.at_rest(self.calls)

    def is_ready(self, refs: list[tuple]) -> bool:
        ((what, step, *_),) = refs
        return what == "commit" or step not in self.slow

    def collect(self, refs: list[tuple], *, tick: Any = None) -> list:
        (call,) = refs
        if call[0] in ("run", "evaluate"):
            assert call == self.open.pop(0)
        error = self.broken.get(call[:2])
        self.unfinished.discard(call[0])
        if isinstance(error, WorkerError) or (error is not None and call[0] != "save"):
            raise error
        if call[0] == "save":
            self.now += self.slow.pop(call[1], 0.0)
            shards = [[{"of": 0, "bytes": 1}], [{"of": 1, "bytes": 2}]]
            return [WrittenShards(its, 0.25) for its in shards] if error is None else [WrittenShards([]), str(error)]
        if call[0] == "evaluate":
            self.now += self.seconds
            result = EvalResult("holdout", 8 * self.losses.get(call[1], 1.0), 8, 1)
            span = Span(call[1], 0, "compute", "0F0", "F", 0, 0, -1, self.now - self.seconds, self.now)
            return [Evaluation((result,), (span._replace(rank=rank),)) for rank in range(self.plan.mesh.size)]
        if call[0] != "run":
            return [None]
        steps = [*self.kept, *(self._step(step) for step in range(call[1], call[1] + call[2]))]
        steps, self.kept = (steps[:-1], steps[-1:]) if call[3] else (steps, [])
        return [steps] * self.plan.mesh.size

    def _step(self, step: int) -> StepResult:
        if step in self.at and self.calls:
            self.at.pop(step)(self.calls)
        start, self.now = self.now, self.now + self.seconds
        span = Span(step, 0, "compute", "0F0", "F", 0, 0, -1, start, self.now)
        return StepResult(step, {0: 1.0}, (LossSum(1.0, 1),), 1.0, 0.1, False, (span,), 0.0, 0.0, 1, 0)


Run = Callable[..., tuple[Ranks, StepLoop]]
HELD_OUT = ("data.holdout=0.1",)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Runs all calls of a configuration; returns the ranks, which list their calls, and the step loop."""

    def do(
        *overrides: str,
        seconds: float = 0.3,
        first: int = 0,
        saved_at: float | None = None,
        prepare: Any = None,
        metrics: bool = True,
    ) -> tuple[Ranks, StepLoop]:
        sizes = ["mesh.pp=2", "model.layers=4", "schedule.microbatches=4", "batch.global_batch_size=8"]
        config: RunConfig = load(None, [f"run.folder={tmp_path}", *sizes, *overrides])
        plan = make_plan(config, "cpu")
        ranks = Ranks(plan, seconds)
        if prepare:
            prepare(ranks)
        with RunFolder(config, plan) as folder:
            display = Display(Console(quiet=True), config.run.name, config.run.steps)
            bus = EventBus(config, folder, display, first, None)
            group: Any = ranks
            at = time.monotonic() if saved_at is None else saved_at
            calls = StepLoop(config, group, bus, ControlRequests(), first, first, at, lambda: False)
            ranks.calls = calls
            calls.run()
        assert not ranks.kept and not calls.in_flight and not calls.open
        steps = [row["step"] for row in read_lines(folder.path / METRICS)]
        assert steps == list(range(first if metrics else 0, calls.done))
        return ranks, calls

    return do


def runs(ranks: Ranks) -> list[tuple[int, int]]:
    return [(call[1], call[2]) for call in ranks.log if call[0] == "run" and call[2]]


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


def test_a_regroup_starts_with_every_step_done_and_saved(run: Run) -> None:
    def change(calls: StepLoop) -> None:
        calls.regrouping = True

    ranks, calls = run("run.steps=1000", prepare=lambda r: r.at.update({20: change}))
    assert 20 < calls.done == calls.submitted == calls.durable < 40
    assert ranks.log[-3:] == [("run", calls.done, 0, False), ("save", calls.done), ("commit", calls.done)]


def test_a_pause_starts_with_every_step_done_and_saves_nothing(run: Run) -> None:
    ranks, _ = run("run.steps=50", seconds=0.9, prepare=lambda r: r.at.update({20: lambda c: c.requests.pause()}))
    assert ranks.rests == 1
    (closed,) = (call[1] for call in ranks.log if call[0] == "run" and not call[2])
    assert 20 < closed < 25
    assert [call[1] for call in ranks.log if call[0] == "save"] == [50]


def test_a_requested_checkpoint_covers_only_recorded_steps(run: Run) -> None:
    def request_checkpoint(calls: StepLoop) -> None:
        calls.requests._requested = calls.done  # as `checkpoint`, which would wait, sets it

    ranks, calls = run("run.steps=50", seconds=0.9, prepare=lambda r: r.at.update({20: request_checkpoint}))
    first = next(call[1] for call in ranks.log if call[0] == "save")
    assert 20 < first < 25
    assert ranks.log.index(("commit", first)) > ranks.log.index(("save", first))
    assert not calls.requests.wants_checkpoint


def test_the_last_step_of_a_call_stays_open_unless_something_else_follows(run: Run) -> None:
    """An evaluation or the end, not a checkpoint."""
    ranks, _ = run("run.steps=12", "checkpoint.every=5", "eval.every=4", *HELD_OUT, seconds=3.0)
    assert [call[1] for call in ranks.log if call[0] == "run" and not call[3]] == [0, 3, 7, 11]


def test_training_goes_on_while_a_checkpoint_is_written_and_waits_with_the_next_one(run: Run) -> None:
    ranks, calls = run(
        "run.steps=18", "checkpoint.every=6", "eval.every=0", seconds=3.0, prepare=lambda r: r.slow.update({6: 60.0})
    )
    calls_in_order = [("run", 11, 1, True), ("commit", 6), ("save", 12), ("run", 12, 1, True)]
    assert [call for call in ranks.log if call in calls_in_order] == calls_in_order
    assert [call[1] for call in ranks.log if call[0] == "save"] == [6, 12, 18]
    events = [row for row in read_lines(calls.bus.folder.path / JOURNAL) if row["event"] == "checkpoint"]
    assert [(row["step"], row["snapshot_seconds"]) for row in events] == [(6, 0.25), (12, 0.25), (18, 0.25)]


def test_a_checkpoint_by_time_is_not_due_while_one_is_written(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(step_loop, "time", clock)

    def prepare(ranks: Ranks) -> None:
        clock.ranks = ranks
        ranks.slow[20] = 100.0

    ranks, calls = run(
        "run.steps=60", "checkpoint.every=20", "checkpoint.every_seconds=5", "eval.every=0",
        seconds=1.0, saved_at=0.0, prepare=prepare,
    )  # fmt: skip
    saves = [call[1] for call in ranks.log if call[0] == "save"]
    assert not [step for step in saves if 20 < step < 40], "the second one by steps waits for the first"
    assert {20, 40, 60} <= set(saves) and len(saves) > 6
    waited = {
        row["step"]: row["waited_seconds"] for row in read_lines(calls.bus.folder.path / JOURNAL) if "bytes" in row
    }
    assert waited[40] == 100.0 and sum(waited.values()) == 100.0


def test_milestones_are_saved_and_kept(run: Run) -> None:
    ranks, _ = run("run.steps=20", "checkpoint.every=6", "checkpoint.keep_every=8", "eval.every=0")
    assert [call[1] for call in ranks.log if call[0] == "save"] == [6, 8, 12, 16, 18, 20]
    assert ranks.pinned == [(), (), (8,), (8,), (8, 16), (8, 16)]


def test_the_checkpoint_of_the_last_step_is_tried_again_when_the_run_stops_there(run: Run) -> None:
    def prepare(ranks: Ranks) -> None:
        def stop_at_rest(calls: StepLoop) -> None:
            ranks.broken.clear()
            calls.requests.resume()
            calls.requests.stop()

        ranks.broken[("save", 8)] = PentadError("disk full")
        ranks.at[6] = lambda calls: calls.requests.pause()
        ranks.at_rest = stop_at_rest

    ranks, calls = run("run.steps=50", "checkpoint.every=4", "eval.every=0", seconds=3.0, prepare=prepare)
    assert [call[1] for call in ranks.log if call[0] == "save"] == [4, 8, 8]
    assert (calls.done, calls.durable) == (8, 8)


@pytest.mark.parametrize("what", ["save", "commit"])
def test_a_failed_checkpoint_does_not_end_training(run: Run, what: str) -> None:
    ranks, calls = run(
        "run.steps=12", "checkpoint.every=4", prepare=lambda r: r.broken.update({(what, 8): PentadError("disk full")})
    )
    assert calls.done == 12
    assert [call[1] for call in ranks.log if call[0] == "commit"] == [4, *([8] if what == "commit" else []), 12]


def test_checkpoints_that_cannot_be_read_do_not_end_training(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreadable(config: RunConfig, folder: RunFolder, step: int) -> tuple[int, ...]:
        if step == 8:
            raise PentadError("Stale file handle")
        return ()

    monkeypatch.setattr(step_loop, "pinned_checkpoints", unreadable)
    ranks, calls = run("run.steps=12", "checkpoint.every=4")
    assert calls.done == 12
    assert [call[1] for call in ranks.log if call[0] == "commit"] == [4, 12]


@pytest.mark.parametrize("what", ["save", "commit"])
def test_the_last_checkpoint_must_be_written(run: Run, what: str) -> None:
    with pytest.raises(PentadError, match="disk full"):
        run("run.steps=12", prepare=lambda r: r.broken.update({(what, 12): PentadError("disk full")}))


@pytest.mark.parametrize("what", ["save", "commit"])
def test_a_rank_that_dies_while_it_saves_ends_the_run(run: Run, what: str) -> None:
    died = WorkerError("rank 1 died", 1, "")
    with pytest.raises(WorkerError, match="rank 1 died"):
        run("run.steps=12", "checkpoint.every=4", prepare=lambda r: r.broken.update({(what, 4): died}))


class Clock:
    """The time of `Ranks`, instead of the module `time`."""

    def __init__(self) -> None:
        self.ranks: Ranks | None = None

    def monotonic(self) -> float:
        return self.ranks.now if self.ranks else 0.0


@pytest.mark.parametrize("every", [0, 15])
@pytest.mark.parametrize("every_seconds", [0.0, 10.0])
def test_checkpoints_are_saved_by_steps_and_by_time(
    run: Run, monkeypatch: pytest.MonkeyPatch, every: int, every_seconds: float
) -> None:
    """Steps of a second, of which two are in flight when the driver looks at the clock."""
    clock = Clock()
    monkeypatch.setattr(step_loop, "time", clock)
    options = f"checkpoint.every={every}", f"checkpoint.every_seconds={every_seconds}"
    ranks, calls = run(
        "run.steps=40", *options, seconds=1.0, saved_at=0.0, prepare=lambda ranks: setattr(clock, "ranks", ranks)
    )
    saves = [call[1] for call in ranks.log if call[0] == "save"]
    assert set(saves) >= {40, *(range(every, 41, every) if every else ())}
    if every_seconds:
        assert max(end - start for start, end in pairwise([0, *saves])) <= 13
        assert len(saves) <= 40 // 10 + (40 // every if every else 0)
    else:
        assert len(saves) == (3 if every else 1)
    assert calls.durable == 40


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


def test_commits_keep_the_best_checkpoint(run: Run) -> None:
    losses = {4: 3.0, 8: 1.0, 12: 2.0, 16: 0.5}
    ranks, calls = run(
        "run.steps=18", *HELD_OUT, "eval.every=2", "checkpoint.every=4", "checkpoint.keep_best=true",
        prepare=lambda ranks: ranks.losses.update(losses),
    )  # fmt: skip
    assert ranks.pinned == [(4,), (8,), (8,), (16,), (16,)]
    events = read_lines(calls.bus.folder.path / JOURNAL)
    assert [row["step"] for row in events if row["event"] == "best"] == [4, 8, 16]
