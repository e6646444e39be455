"""The calls that keep the ranks busy: steps in bunches of about a second, and checkpoints between them."""

from __future__ import annotations

from collections import deque
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

from pentad.orchestrator.config import RunConfig
from pentad.orchestrator.display import Display, RankState
from pentad.orchestrator.group import Refs, WorkerError, WorkerGroup
from pentad.orchestrator.interrupts import Interrupts
from pentad.orchestrator.measure import History
from pentad.orchestrator.runfolder import RunFolder
from pentad.orchestrator.worker import Status
from pentad.schedules.errors import PentadError

CALL_SECONDS = 1.0  # how much work a call should be
AHEAD = 2  # calls handed in: the ranks never wait for the driver


class Call(NamedTuple):
    """Pending on all ranks: `steps` steps from `step` on, or (0 of them) the checkpoint after `step` steps."""

    refs: Refs
    step: int
    steps: int = 0


class Calls:
    """From step `first` to the last one, or until an interrupt asks to stop; `done` steps are complete."""

    def __init__(
        self,
        config: RunConfig,
        group: WorkerGroup,
        folder: RunFolder,
        display: Display,
        history: History,
        interrupts: Interrupts,
        first: int,
    ) -> None:
        self.config, self.group, self.folder, self.display = config, group, folder, display
        self.history, self.interrupts = history, interrupts
        self.done = self.submitted = self.saved = first
        self.pace = 1  # steps a call
        self.pending: deque[Call] = deque()
        self.committing: Call | None = None
        self.announced = False

    def run(self) -> None:
        """Raises WorkerError when a rank fails, and PentadError when the last checkpoint cannot be written."""
        while True:
            while len(self.pending) < AHEAD and (call := self._next()):
                self.pending.append(call)
            if not self.pending:
                break
            call = self.pending.popleft()
            if call.steps:
                self._account(call)
            else:
                self._commit(call)
        self._committed(wait=True)

    @property
    def ending(self) -> bool:
        return self.interrupts.asked or self.submitted == self.config.run.steps

    def _next(self) -> Call | None:
        """Hands in what comes after the calls handed in so far."""
        every, step = self.config.checkpoint.every, self.submitted
        if step > self.saved and (self.ending or (every and step % every == 0)):
            self.saved = step
            return Call(self.group.submit_save(self._checkpoint(step), step), step)
        if self.ending:
            return None
        limit = min(self.config.run.steps, (step // every + 1) * every if every else self.config.run.steps)
        count = min(self.pace, limit - step)
        self.submitted += count
        return Call(self.group.submit_run(step, count), step, count)

    def _account(self, call: Call) -> None:
        """Waits for steps, writes and shows them, and makes the next call about as long as it should be."""
        rows = self.history.add(self.group.collect(call.refs, tick=self._tick))
        self.done = call.step + call.steps
        self._committed(wait=False)
        for row in rows:
            self.folder.metrics(row)
            self.display.step(row)
            if row["skipped"]:
                self.display.note(f"step {row['step']} had a gradient norm that is not finite: no weight changed")
        seconds = sum(row["step_seconds"] for row in rows) / len(rows)
        self.pace = max(1, min(4 * self.pace, int(CALL_SECONDS / seconds)))

    def _commit(self, call: Call) -> None:
        """Waits for shards and has them committed while training goes on; a full disk ends only a run's last save."""
        self.history.pause()
        self._committed(wait=True)
        try:
            shards = [shard for its in self.group.collect(call.refs, tick=self._tick) for shard in its]
        except WorkerError:
            raise
        except PentadError as error:
            self._not_written(call.step, error)
            return
        plan = self.group.plan
        meta = {"run": plan.name, "epoch": self.history.epoch, "program": plan.program.hash, "mesh": asdict(plan.mesh)}
        meta["data"] = plan.fingerprint
        keep, path = self.config.checkpoint.keep, self._checkpoint(call.step)
        self.committing = Call(self.group.submit_commit(path, call.step, shards, meta, keep), call.step)

    def _committed(self, *, wait: bool) -> None:
        """Takes note of a commit that is done, or waits until it is."""
        call = self.committing
        if call is None or not (wait or self.group.ready(call.refs)):
            return
        self.committing = None
        try:
            self.group.collect(call.refs, tick=self._tick)
        except WorkerError:
            raise
        except PentadError as error:
            self._not_written(call.step, error)
            return
        self.folder.event("checkpoint", epoch=self.history.epoch, step=call.step)

    def _not_written(self, step: int, error: PentadError) -> None:
        if self.ending and step == self.submitted:
            raise error
        self.folder.event("checkpoint failed", epoch=self.history.epoch, step=step, error=str(error))
        self.display.note(f"no checkpoint of step {step}, training goes on: {error}")

    def _checkpoint(self, step: int) -> Path:
        return self.folder.checkpoints / f"step-{step:08d}"  # as workers/checkpoint.py calls it

    def _tick(self, statuses: dict[int, Status]) -> None:
        """Shows what the ranks do during a long call."""
        if self.interrupts.asked and not self.announced:
            self.announced = True
            self.display.note("stopping after the steps under way; once more stops at once, without a checkpoint")
        mesh = self.group.plan.mesh
        known = sorted(statuses.items())
        self.display.refresh([RankState(r, mesh.coordinates(r), _state(s), s.instruction, s.step) for r, s in known])


def _state(status: Status) -> str:
    if not status.instruction:
        return "idle"
    return "waiting" if "RECV" in status.instruction else "running"
