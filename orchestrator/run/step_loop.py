"""The calls that keep the ranks busy: steps in bunches of about a second, and checkpoints between them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from pentad.orchestrator.cluster.faults import WorkerError
from pentad.orchestrator.cluster.group import Refs, WorkerGroup
from pentad.orchestrator.cluster.worker import Status
from pentad.orchestrator.config.config import RunConfig
from pentad.orchestrator.monitoring.event_bus import EventBus
from pentad.orchestrator.monitoring.run_state import ControlRequests
from pentad.orchestrator.run.health import Health
from pentad.orchestrator.run.interrupts import Interrupts
from pentad.orchestrator.run.measure import History
from pentad.schedules.ir.errors import PentadError
from pentad.workers.runtime.results import StepResult

CALL_SECONDS = 1.0  # how much work a call should be
AHEAD = 2  # calls handed in: the ranks never wait for the driver
PAUSE_SECONDS = 0.5


class Call(NamedTuple):
    """Pending on all ranks: steps, which bring the accounts of those that are complete, or, with `saves`, the
    checkpoint after `step` steps. `step` are handed in with it and before it."""

    refs: Refs
    step: int
    saves: bool = False
    since: float = 0.0


class Calls:
    """The steps of one generation: from `first` to the last one, until somebody asks to stop, or until `change` says
    that the ranks should be placed anew (it is asked about once a second). `done` steps are complete, `saved` are in a
    checkpoint."""

    def __init__(
        self,
        config: RunConfig,
        group: WorkerGroup,
        news: EventBus,
        history: History,
        interrupts: Interrupts,
        wishes: ControlRequests,
        first: int,
        saved: int,
        change: Callable[[], bool],
    ) -> None:
        self.config, self.group, self.news, self.history = config, group, news, history
        self.interrupts, self.wishes, self.change = interrupts, wishes, change
        self.done = self.submitted = first
        self.saved = self.durable = saved  # steps of the newest checkpoint handed in, and committed
        self.pace = 1  # steps a call
        self.pending: deque[Call] = deque()
        self.committing: Call | None = None
        self.open = False  # the newest step handed in: a call must follow
        self.announced = self.changing = self.told = False
        self.health = Health(group, config.elastic.hang_seconds, config.cluster.start_timeout_seconds)

    def run(self) -> None:
        """Raises WorkerError when a rank fails, and PentadError when the last checkpoint cannot be written."""
        while True:
            while len(self.pending) < AHEAD and (call := self._next()):
                self.pending.append(call)
            if self.pending:
                call = self.pending.popleft()
                if call.saves:
                    self._commit(call)
                else:
                    self._account(call)
            elif self.wishes.paused and not self.ending:
                self._pause()
            else:
                break
        self._committed(wait=True)

    @property
    def ending(self) -> bool:
        asked = self.interrupts.asked or self.wishes.stopping or self.changing
        return asked or self.submitted == self.config.run.steps

    def add(self, steps: list[list[StepResult]]) -> None:
        """Takes the accounts of steps that are done, [step][result], from whichever ranks have them."""
        if not steps:
            return
        self._tell([row for step in steps for row in self.history.add([[result] for result in step])])

    def _next(self) -> Call | None:
        """Hands in what comes after the calls handed in so far."""
        every, step = self.config.checkpoint.every, self.submitted
        ending, paused = self.ending, self.wishes.paused
        due = step > self.saved and (ending or (every and step % every == 0) or self.wishes.wants_checkpoint)
        if self.open and (due or ending or paused):  # only steps follow upon one that is open
            self.open = False
            return Call(self.group.submit_run(step, 0), step)
        if due:
            self.saved = step
            return Call(self.group.submit_save(self._checkpoint(step), step), step, True, time.monotonic())
        if self.wishes.wants_checkpoint and step == self.saved and self.committing is None and not self.pending:
            self.wishes.saved(step)
        if ending or paused:
            return None
        limit = min(self.config.run.steps, (step // every + 1) * every if every else self.config.run.steps)
        count = min(self.pace, limit - step)
        self.submitted += count
        self.open = self.submitted < limit  # there comes another step, unless somebody asks for something else
        return Call(self.group.submit_run(step, count, more=self.open), self.submitted)

    def _account(self, call: Call) -> None:
        """Waits for steps, writes and shows them, and makes the next call about as long as it should be."""
        results = self.group.collect(call.refs, tick=self._stepping)
        self._committed(wait=False)
        if results[0]:
            rows = self.history.add(results)
            self._tell(rows)
            seconds = sum(row["step_seconds"] for row in rows) / len(rows)
            self.pace = max(1, min(4 * self.pace, int(CALL_SECONDS / seconds)))

    def _tell(self, rows: list[dict[str, Any]]) -> None:
        self.done = rows[-1]["step"] + 1
        self.news.steps(rows, list(self.history.recent)[-len(rows) :])

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
        keep, path = self.config.checkpoint.keep, self._checkpoint(call.step)
        refs = self.group.submit_commit(path, call.step, shards, keep)
        self.committing = call._replace(refs=refs)
        self.bytes = sum(shard["bytes"] for shard in shards)

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
        seconds = round(time.monotonic() - call.since, 3)
        self.news.event(
            "checkpoint", generation=self.group.generation, step=call.step, seconds=seconds, bytes=self.bytes
        )
        self.durable = call.step
        self.wishes.saved(call.step)

    def _not_written(self, step: int, error: PentadError) -> None:
        if self.ending and step == self.submitted:
            raise error
        self.news.event("checkpoint failed", generation=self.group.generation, step=step, error=str(error))
        self.news.display.note(f"no checkpoint of step {step}, training goes on: {error}")

    def _checkpoint(self, step: int) -> Path:
        return self.news.folder.checkpoint(step)

    def _pause(self) -> None:
        """The ranks wait between two steps until somebody says resume."""
        if self.news.view.state != "paused":
            self.news.event("pause", generation=self.group.generation, step=self.done)
            self.news.display.note(f"paused after step {self.done}; `pentad resume {self.config.run.name}` goes on")
            self.news.state("paused")
        self._committed(wait=False)
        self.group.ping(self._tick)
        self.history.pause()
        self.wishes.wait(PAUSE_SECONDS)
        if not self.wishes.paused:
            self.news.event("resume", generation=self.group.generation, step=self.done)
            self.news.display.note("resumed")
            self.news.state("running")

    def _stepping(self, statuses: dict[int, Status]) -> None:
        self._tick(statuses, stepping=True)

    def _tick(self, statuses: dict[int, Status], *, stepping: bool = False) -> None:
        """Shows what the ranks do during a long call, and ends it when they do nothing for too long."""
        if self.wishes.aborted:
            raise PentadError("the run was aborted through its control service, without a checkpoint")
        if (self.interrupts.asked or self.wishes.stopping) and not self.announced:
            self.announced = True
            self.news.display.note("stopping after the steps under way; once more stops at once, without a checkpoint")
            self.news.state("stopping")
        self.changing = self.changing or self.change()
        stall = self.health.look(statuses, self.history.measured, stepping=stepping)
        self.news.ranks(statuses, self.group.heard, stall.causes if stall else ())
        if stall is None:
            self.told = False
            return
        if stall.late:
            raise self.health.fault(stall)
        if not self.told:
            self.told = True
            self.news.display.note(stall.verdict.sentence)
        self.news.say(verdict=stall.verdict.sentence)
