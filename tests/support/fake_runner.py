"""A Runner without torch that writes a board and makes up results. `data.path` configures it: 'fake:key=value,...'.

| key | what |
|---|---|
| seconds | length of a step |
| rank, step, how | there and then: raise, mistake (a user's), die or hang; the other ranks wait forever |
| slow | seconds that `__init__` takes |
| full | 1: every save finds the disk full |
| saving | seconds that a rank takes to write its part of a checkpoint |
| nan | 1: the gradient norm of step 1 is not a number |
| evaluation | instead of a step: the evaluation after this many steps, in which `rank` obeys `how` |
"""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy

from pentad.schedules.ir.errors import PentadError
from pentad.schedules.simulate.costs import Costs
from pentad.schedules.simulate.simulate import simulate
from pentad.schedules.simulate.timeline import Span
from pentad.schedules.spec.plan import Plan
from pentad.workers.abort import Aborted
from pentad.workers.checkpoint.atomic_io import write_file
from pentad.workers.checkpoint.checkpoint import open_checkpoint
from pentad.workers.checkpoint.checksums import Damaged
from pentad.workers.checkpoint.location import location
from pentad.workers.checkpoint.manifest import Shard
from pentad.workers.lanes.progress_file import ProgressFile
from pentad.workers.runtime.results import EvalResult, Evaluation, LossSum, RankSnapshot, StepResult, WrittenShards


class FakeRunner:
    def __init__(
        self,
        plan: Plan,
        rank: int,
        board: Path,
        generation: int = 1,
        gpu: int = 0,
        before: FakeRunner | None = None,
        *,
        copies: Any = None,
    ) -> None:
        self.plan, self.rank, self.pp = plan, rank, plan.mesh.coordinates(rank).pp
        self.orders = dict(
            pair.split("=") for pair in plan.data.sources[0].path.partition("fake:")[2].split(",") if "=" in pair
        )
        self.board = ProgressFile(board, generation)
        time.sleep(float(self.orders.get("slow", 0)))
        step = simulate(plan.program, Costs.uniform(plan.program.stages))
        self.seconds = float(self.orders.get("seconds", 0.002))
        scale = self.seconds / max(span.end for span in step.spans)
        self.spans = [s._replace(start=s.start * scale, end=s.end * scale) for s in step.spans if s.rank == self.pp]
        self.steps: int = before.steps if before is not None else 0
        self.freed, self.changed, self.copied = threading.Event(), threading.Condition(), -1
        self.results: list[StepResult] = []
        self.open: list[StepResult] = []  # results to return from the next call

    def serve(self, host: str, timeout_seconds: float) -> str:
        return f"{host}:0"

    def connect(self, address: str, timeout_seconds: float) -> None:
        assert address.count(":") == 1

    def position(self) -> None:
        return None

    def fence(self) -> None:
        self.freed.set()

    def leave(self) -> RankSnapshot:
        self.results, self.open = [*self.results, *self.open], []
        return RankSnapshot(self.steps, False, 1.0, tuple(self.results))

    def receive(self, sources: dict[int, int], step: int) -> None:
        assert set(sources) <= set(range(self.plan.program.stages))
        self.steps = step

    def restore(self, folder: str | None, step: int = 0, optimizer: bool = True) -> PentadError | None:
        self.steps = step
        if folder:
            try:
                open_checkpoint(location(folder))
            except Damaged as error:
                return error
            saved = int(safetensors.numpy.load_file(Path(folder, "stage-000.safetensors"))["steps"])
            assert step in (0, saved), "another run's steps count, or do not"
        return None

    def run(
        self, first_step: int, count: int, more: bool = False, skipped_batches: tuple[tuple[int, int], ...] = ()
    ) -> list[StepResult]:
        results = [*self.open, *(self._step(step) for step in range(first_step, first_step + count))]
        self.results, self.open = (results[:-1], results[-1:]) if more else (results, [])
        return self.results

    def evaluate(self, step: int) -> Evaluation:
        assert not self.open, "nothing is evaluated while a step is open"
        assert self.plan.eval is not None and (self.rank or self.steps == step)
        for counter in range(len(self.plan.eval.program.streams[self.pp])):
            self.board.write(step, counter, program=len(self.plan.programs) - 1)
            if step == int(self.orders.get("evaluation", -1)) and counter == 2:
                self._obey(self.rank == int(self.orders["rank"]), self.orders["how"])
        self.board.write(step, -1, program=len(self.plan.programs) - 1)
        data_sets = (EvalResult(each.name, 64 * eval_loss_of(step), 64, 2) for each in self.plan.eval.data_sets)
        start, program = time.monotonic(), self.plan.eval.program
        spans = simulate(program, Costs.uniform(program.stages), step=step).spans
        own = [span._replace(rank=self.rank) for span in spans if span.rank == self.pp]
        scale = self.seconds / max(span.end for span in spans)
        timed = (span._replace(start=start + span.start * scale, end=start + span.end * scale) for span in own)
        return Evaluation(step, tuple(data_sets), tuple(timed))

    def snapshot(self, step: int) -> None:
        assert self.rank or self.steps == step
        with self.changed:
            self.copied = step
            self.changed.notify_all()

    def write(self, folder: str, step: int) -> WrittenShards:
        with self.changed:
            while self.copied != step:
                if self.freed.is_set():
                    raise Aborted
                self.changed.wait(0.05)
        time.sleep(float(self.orders.get("saving", 0)))
        if "full" in self.orders:
            raise PentadError("checkpoint.every finds the disk full")
        return WrittenShards(self._shards(folder))

    def save(self, folder: str, step: int, stages: tuple[int, ...]) -> list[dict]:
        return self._shards(folder)

    def _shards(self, folder: str) -> list[dict]:
        if self.rank:
            return []
        Path(folder).mkdir(exist_ok=True)
        content = safetensors.numpy.save({"steps": np.array(self.copied)})
        written = write_file(Path(folder, "stage-000.safetensors"), [memoryview(content)])
        return [
            Shard(
                "stage-000.safetensors",
                written.bytes,
                written.sha256,
                {"steps": {"dtype": "I64", "shape": []}},
                written.crc32,
            ).plain()
        ]

    def close(self) -> None:
        pass

    def _step(self, step: int) -> StepResult:
        assert self.rank or self.steps == step, "steps come in order, and a restored run continues where it stopped"
        start = time.monotonic()
        for counter in range(len(self.plan.program.streams[self.pp])):
            self.board.write(step, counter)
            if step == int(self.orders.get("step", -1)) and counter == 2:
                self._obey(self.rank == int(self.orders["rank"]), self.orders["how"])
        time.sleep(max(0.0, start + self.seconds - time.monotonic()))
        self.board.write(step, -1)
        self.steps = step + 1
        last = self.pp == self.plan.mesh.pp - 1
        at = self.plan.mesh.coordinates(self.rank)
        numbers = range(at.dp * self.plan.batch.microbatches, (at.dp + 1) * self.plan.batch.microbatches)
        return StepResult(
            step=step,
            losses={number: loss_of(step, number) for number in numbers} if last else {},
            sources=(LossSum(0.0, self.plan.batch.tokens),),
            grad_norm=float("nan") if "nan" in self.orders and step == 1 else 1.0,
            learning_rate=self.plan.optimizer.learning_rate.at(step),
            skipped="nan" in self.orders and step == 1,
            spans=tuple(self._span(span, step, start) for span in self.spans),
            data_wait_seconds=0.0,
            host_seconds=0.001,
            instructions=len(self.spans),
            peak_bytes=self.rank,
        )

    def _span(self, span: Span, step: int, start: float) -> Span:
        return span._replace(step=step, rank=self.rank, start=span.start + start, end=span.end + start)

    def _obey(self, mine: bool, how: str) -> None:
        if mine and how == "raise":
            raise ZeroDivisionError("no such number")
        if mine and how == "mistake":
            raise PentadError("data.path is wrong: expected a right one")
        if mine and how == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if how != "none":
            self.freed.wait(3600)  # as in a collective that another member never joins
            raise Aborted


def eval_loss_of(step: int) -> float:
    """The loss per token after this many steps, least after 6."""
    return 1.0 + (step - 6) ** 2


def loss_of(step: int, number: int) -> float:
    """The loss sum of a microbatch: all differ, and the last bits of their total depend on the order of summation."""
    return 100.0 / (step + 1) + 0.1 * number
