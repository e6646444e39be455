"""A worker group that only lists its calls, and a step loop that runs on it."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from small_checkpoint import save_small

from pentad.orchestrator.cluster.copies import GroupCopies
from pentad.orchestrator.cluster.faults import WorkerError
from pentad.orchestrator.config.config import RunConfig, load
from pentad.orchestrator.monitoring.display import Display
from pentad.orchestrator.monitoring.event_bus import EventBus
from pentad.orchestrator.monitoring.run_state import ControlRequests
from pentad.orchestrator.monitoring.runfolder import METRICS, RunFolder
from pentad.orchestrator.planning.planning import make_plan
from pentad.orchestrator.records.json_lines import read_lines
from pentad.orchestrator.run import saving, step_loop
from pentad.orchestrator.run.step_loop import StepLoop
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.simulate.timeline import Span
from pentad.schedules.spec.plan import Plan
from pentad.workers.checkpoint.checkpoint import committed, fingerprint, folder_of, step_of
from pentad.workers.integrity.result import RankCheck
from pentad.workers.runtime.results import Committed, EvalResult, Evaluation, LossSum, StepResult, WrittenShards

HELD_OUT = ("data.holdout=0.1",)


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
        self.pinned: list[tuple[int, ...]] = []  # what each commit retains
        self.discarded: list[int | None] = []  # checkpoints
        self.unfinished: set[str] = set()  # of a checkpoint
        self.slow: dict[int, float] = {}  # checkpoint -> seconds until it is written, for those to be waited for
        self.losses: dict[int, float] = {}  # of evaluations; 1 by default
        self.states: dict[tuple[int, int], int] = {}  # after this many steps, by rank; by default equal on all ranks

    def _submit(self, *call: Any) -> list[tuple]:
        if call[0] in ("evaluate", "check"):
            before = next((each for each in reversed(self.log) if each[0] == "run"), None)
            assert before is None or not before[-1], "a step is open, and no run follows"
        self.log.append(call)
        if call[0] in ("run", "evaluate", "check"):
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

    def submit_check(self, step: int) -> list[tuple]:
        return self._submit("check", step, False)

    def submit_commit(self, folder: Path, step: int, shards: list) -> list[tuple]:
        assert [shard["of"] for shard in shards] == [0, 1]
        assert self.calls is None or self.calls.done >= step, "a checkpoint is of steps that are accounted for"
        self.unfinished.add("commit")
        save_small(folder, step)
        self.checkpoints = folder.parent
        return self._submit("commit", step)

    def submit_beside(self, method: str, folder: Path, *arguments: Any) -> list[tuple]:
        if method == "prune":
            self.pinned.append(arguments[1])
        if method == "discard":
            self.discarded.append(step_of(folder))
        return [(method, step_of(folder))]

    def label(self, rank: int) -> str:
        return f"rank {rank}"

    def ping(self, tick: Any) -> None:
        assert not self.kept and not self.open
        self.rests += 1
        assert self.calls is not None
        self.at_rest(self.calls)

    def is_ready(self, refs: list[tuple]) -> bool:
        ((what, step, *_),) = refs
        return what != "save" or step not in self.slow

    def collect(self, refs: list[tuple], *, tick: Any = None) -> list:
        (call,) = refs
        if call[0] in ("run", "evaluate", "check"):
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
            return [Evaluation(call[1], (result,), (span._replace(rank=rank),)) for rank in range(self.plan.mesh.size)]
        if call[0] == "check":
            self.now += self.seconds
            return [RankCheck({"w": self.states.get((call[1], rank), 0)}, {}, {}) for rank in range(3)]
        if call[0] == "commit":
            folder = folder_of(self.checkpoints, call[1])
            return [Committed(fingerprint(folder), list(committed(self.checkpoints)))]
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


class Clock:
    """The time of `Ranks`, in place of the module `time`."""

    def __init__(self) -> None:
        self.ranks: Ranks | None = None

    def patch(self, patch: pytest.MonkeyPatch) -> None:
        for module in (saving, step_loop):
            patch.setattr(module, "time", self)

    def monotonic(self) -> float:
        return self.ranks.now if self.ranks else 0.0


def loop_runner(folder: Path) -> Run:
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
        config: RunConfig = load(None, [f"run.folder={folder}", *sizes, *overrides])
        plan = make_plan(config, "cpu")
        ranks = Ranks(plan, seconds)
        if prepare:
            prepare(ranks)
        with RunFolder(config, plan) as made:
            display = Display(Console(quiet=True), config.run.name, config.run.steps)
            bus = EventBus(config, made, display, first, None)
            group: Any = ranks
            at = time.monotonic() if saved_at is None else saved_at
            calls = StepLoop(
                config, group, bus, ControlRequests(), first, first, at, GroupCopies(group), lambda statuses: None
            )
            ranks.calls = calls
            calls.run()
        assert not ranks.kept and not calls.in_flight and not calls.open
        steps = [row["step"] for row in read_lines(made.path / METRICS)]
        assert steps == list(range(first if metrics else 0, calls.done))
        return ranks, calls

    return do
