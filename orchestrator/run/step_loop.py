"""Keeps the ranks busy: submits steps in calls of about a second, with checkpoints between them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeVar

from pentad.orchestrator.cluster.faults import WorkerError
from pentad.orchestrator.cluster.group import Refs, WorkerGroup
from pentad.orchestrator.cluster.worker import Status
from pentad.orchestrator.config.config import RunConfig
from pentad.orchestrator.monitoring.evaluations import Best, evaluation_rows
from pentad.orchestrator.monitoring.event_bus import EventBus
from pentad.orchestrator.monitoring.run_state import ControlRequests
from pentad.orchestrator.recovery.hang_detection import HangDetector
from pentad.orchestrator.recovery.spikes import SpikeWatch, pinned_checkpoints
from pentad.orchestrator.run.measure import History
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.spec.spikes import batch_of
from pentad.workers.data.mixture import Mixture
from pentad.workers.runtime.results import StepResult

CALL_SECONDS = 1.0  # target length of a call
CALLS_IN_FLIGHT = 2  # the ranks never wait for the driver
PAUSE_SECONDS = 0.5
T = TypeVar("T")


class Call(NamedTuple):
    """A call in flight on all ranks: steps, which returns the results of those that are complete, or, with `evaluates`,
    the evaluation after `step` steps, or, with `saves`, the checkpoint of `bytes` after them, with which `best` is the
    best one. `step` is the number of steps submitted up to and including this call."""

    refs: Refs
    step: int
    saves: bool = False
    began: float = 0.0
    bytes: int = 0
    evaluates: bool = False
    best: Best | None = None


class StepLoop:
    """The steps of one generation: from `first` to the last, or until a stop is requested, or until `should_regroup`,
    asked about once a second, says that the ranks should be placed again. `done` steps are complete, `durable` steps
    are in a committed checkpoint; at the monotonic second `saved_at` the newest one was submitted or committed. The
    newest evaluation was after `evaluated` steps. Nothing is recorded after a spike because of which the run goes
    back."""

    def __init__(
        self,
        config: RunConfig,
        group: WorkerGroup,
        bus: EventBus,
        requests: ControlRequests,
        first: int,
        saved: int,
        saved_at: float,
        should_regroup: Callable[[], bool],
    ) -> None:
        self.config, self.group, self.bus, self.requests = config, group, bus, requests
        self.should_regroup = should_regroup
        keep, clocks = config.metrics.timeline_steps, group.offsets
        self.history = History(group.plan, group.generation, keep=keep, offsets=clocks, device_name=group.device_name)
        self.mixture = Mixture(group.plan.data, group.plan.batch.sizes)
        self.first = self.done = self.submitted = first
        self.saved = self.durable = saved  # steps in the newest checkpoint submitted, and committed
        self.saved_at = saved_at
        self.evaluated = max((row["step"] for row in bus.folder.evaluations()), default=-1)
        self.steps_per_call = 1
        self.in_flight: deque[Call] = deque()
        self.collected_at = time.monotonic()  # when the last call ended
        self.committing: Call | None = None
        self.open = False  # the last step submitted is open: another run call must follow
        self.spikes = SpikeWatch(config.spikes, requests)
        self.stop_announced = self.regrouping = self.stall_reported = False
        self.hangs = HangDetector(group, config.elastic.hang_seconds, config.cluster.start_timeout_seconds)

    def run(self) -> None:
        """Raises WorkerError when a rank fails, and PentadError when the last checkpoint cannot be written."""
        while True:
            while len(self.in_flight) < CALLS_IN_FLIGHT and (call := self._submit()):
                self.in_flight.append(call)
            if self.in_flight:
                call = self.in_flight.popleft()
                if call.saves:
                    self._commit(call)
                elif call.evaluates:
                    self._collect_evaluation(call)
                else:
                    self._collect(call)
                self.collected_at = time.monotonic()  # the ranks are at the next call
            elif self.requests.paused and not self.ending:
                self._pause()
            else:
                break
        self._finish_commit(wait=True)

    @property
    def ending(self) -> bool:
        return self.requests.stopping or self.regrouping or self.submitted == self.config.run.steps

    def add(self, steps: list[list[StepResult]]) -> None:
        """Records completed steps, [step][result], from whichever ranks have results of them."""
        if steps and self.spikes.spike is None:
            self._record([row for step in steps for row in self.history.add([[result] for result in step])])

    def _submit(self) -> Call | None:
        """Submits the next call, if there is one."""
        every, step = self.config.checkpoint.every, self.submitted
        if self.spikes.spike is not None:
            was_open, self.open = self.open, False
            return Call(self.group.submit_run(step, 0), step) if was_open else None
        late = 0 < self.config.checkpoint.every_seconds <= time.monotonic() - self.saved_at
        ending, paused, requested = self.ending, self.requests.paused, self.requests.wants_checkpoint
        due = step > self.saved and (ending or (every and step % every == 0) or late or requested)
        evaluates = self._evaluation_due(step)
        if self.open and (due or evaluates or ending or paused):  # nothing but a run call may follow an open step
            self.open = False
            return Call(self.group.submit_run(step, 0), step)
        if evaluates:  # before the checkpoint, which may turn out to be the best
            self.evaluated = step
            return Call(self.group.submit_evaluate(step), step, evaluates=True, began=time.monotonic())
        if due:
            self.saved, self.saved_at = step, time.monotonic()
            refs = self.group.submit_save(self.bus.folder.checkpoint(step), step)
            return Call(refs, step, saves=True, began=self.saved_at)
        if requested and step == self.saved and self.committing is None and not self.in_flight:
            self.requests.checkpoint_saved(step)
        if ending or paused:
            return None
        stops = [(step // each + 1) * each for each in (every, self.evaluates_every) if each]
        limit = min([self.config.run.steps, *stops])
        count = min(self.steps_per_call, limit - step)
        self.submitted += count
        # The first call is closed, so that its results arrive before the second call is done.
        self.open = self.submitted < limit and step > self.first
        return Call(self.group.submit_run(step, count, more=self.open), self.submitted)

    def _collect(self, call: Call) -> None:
        """Waits for steps, records them, and adapts the length of a call."""
        results = self.group.collect(call.refs, tick=partial(self._tick, stepping=True))
        self._finish_commit(wait=False)
        if results[0] and self.spikes.spike is None:
            rows = self.history.add(results)
            self._record(rows)
            seconds = sum(row["step_seconds"] for row in rows) / len(rows)
            self.steps_per_call = max(1, min(4 * self.steps_per_call, int(CALL_SECONDS / seconds)))

    @property
    def evaluates_every(self) -> int:
        return 0 if self.group.plan.eval is None else self.config.eval.every

    def _evaluation_due(self, step: int) -> bool:
        """Whether to evaluate the weights after `step` steps. A run that stops or regroups leaves that to the next."""
        if self.group.plan.eval is None or step <= self.evaluated or self.requests.stopping or self.regrouping:
            return False
        return self.config.eval.next_due(step, self.config.run.steps) == step

    def _collect_evaluation(self, call: Call) -> None:
        """Waits for an evaluation and records it. Its time is not part of the next step."""
        results = self.group.collect(call.refs, tick=partial(self._tick, stepping=True))
        self._finish_commit(wait=False)
        seconds = time.monotonic() - max(call.began, self.collected_at)
        rows = evaluation_rows(call.step, results[0].data_sets, seconds, self.group.generation)
        self.bus.evaluated(rows, self.history.add_evaluation(results))

    def _record(self, rows: list[dict[str, Any]]) -> None:
        spans, rows = list(self.history.recent)[-len(rows) :], self.spikes.until_spike(rows)
        self.done = rows[-1]["step"] + 1
        self._record_changes(rows)
        self.bus.steps_done(rows, spans[: len(rows)])
        self.spikes.react(rows)

    def _record_changes(self, rows: list[dict[str, Any]]) -> None:
        """Writes to the journal where the mixture or the batch size changes."""
        sizes, generation = self.mixture.sizes, self.group.generation
        for row in rows:
            batch = batch_of(row["step"], self.group.skipped_batches)
            for change in self.mixture.changes(batch):
                self.bus.record("mixture", generation=generation, step=row["step"], **change)
            if batch and sizes.size(batch) != sizes.size(batch - 1):
                size = sizes.size(batch)
                self.bus.record("batch size", generation=generation, step=row["step"], global_batch_size=size)

    def _commit(self, call: Call) -> None:
        """Waits for the shards and submits the commit, which runs beside training."""
        self.history.pause()
        self._finish_commit(wait=True)
        answers = self._collect_checkpoint(call)
        others = self._or_note(call, lambda: self._pinned_and_best(call.step))
        if answers is not None and others is not None:
            pinned, best = others
            shards = [shard for its in answers for shard in its]
            path, keep = self.bus.folder.checkpoint(call.step), self.config.checkpoint.keep
            refs = self.group.submit_commit(path, call.step, shards, keep, pinned)
            size = sum(shard["bytes"] for shard in shards)
            self.committing = call._replace(refs=refs, bytes=size, best=best)

    def _pinned_and_best(self, step: int) -> tuple[tuple[int, ...], Best | None]:
        """The checkpoints to keep beside the newest ones, and the best, once there is one of `step` steps."""
        return pinned_checkpoints(self.config, self.bus.folder, step), self.bus.folder.best(step)

    def _finish_commit(self, *, wait: bool) -> None:
        """Records a commit that has completed; with `wait` waits until it has."""
        call = self.committing
        if call is None or not (wait or self.group.is_ready(call.refs)):
            return
        self.committing, self.saved_at = None, time.monotonic()
        if self._collect_checkpoint(call) is None:
            return
        seconds, generation = round(time.monotonic() - call.began, 3), self.group.generation
        self.bus.record("checkpoint", generation=generation, step=call.step, seconds=seconds, bytes=call.bytes)
        self.durable = call.step
        if (best := call.best) and best.step == call.step:
            self.bus.record("best", generation=generation, step=best.step, loss=best.loss)
            self.bus.display.note(f"the checkpoint of step {best.step} is the best so far: loss {best.loss:.4f}")
        self.requests.checkpoint_saved(call.step)

    def _collect_checkpoint(self, call: Call) -> list[Any] | None:
        """The answers to a save or a commit."""
        return self._or_note(call, lambda: self.group.collect(call.refs, tick=self._tick))

    def _or_note(self, call: Call, action: Callable[[], T]) -> T | None:
        """What the action returns; None when the disk is full or cannot be read, which is fatal only for a run's last
        checkpoint."""
        try:
            return action()
        except WorkerError:
            raise
        except PentadError as error:
            if self.ending and call.step == self.submitted:
                raise
            self.bus.record("checkpoint failed", generation=self.group.generation, step=call.step, error=str(error))
            self.bus.display.note(f"no checkpoint of step {call.step}, training continues: {error}")
            return None

    def _pause(self) -> None:
        """The ranks wait between two steps; called again and again until a resume is requested."""
        if self.bus.view.state != "paused":
            self.bus.record("pause", generation=self.group.generation, step=self.done)
            self.bus.display.note(f"paused after step {self.done}; resume with `pentad resume {self.config.run.name}`")
            self.bus.set_state("paused")
        self._finish_commit(wait=False)
        self.group.ping(self._tick)
        self.history.pause()
        self.requests.wait(PAUSE_SECONDS)
        if not self.requests.paused:
            self.bus.record("resume", generation=self.group.generation, step=self.done)
            self.bus.display.note("resumed")
            self.bus.set_state("running")

    def _tick(self, statuses: dict[int, Status], *, stepping: bool = False) -> None:
        """Shows what the ranks do during a call, and raises WorkerError when they hang."""
        if self.requests.aborted:
            raise PentadError("the run was aborted through its control service, without a checkpoint")
        if self.requests.stopping and not self.stop_announced:
            self.stop_announced = True
            self.bus.display.note("stopping after the steps in flight; once more stops at once, without a checkpoint")
            self.bus.set_state("stopping")
        self.regrouping = self.regrouping or self.should_regroup()
        stall = self.hangs.check(statuses, self.history.measured, stepping=stepping)
        self.bus.update_ranks(statuses, self.group.last_heard, stall.causes if stall else ())
        if stall is None:
            self.stall_reported = False
            return
        if stall.late:
            raise self.hangs.fault(stall)
        if not self.stall_reported:
            self.stall_reported = True
            self.bus.display.note(stall.verdict.sentence)
        self.bus.update(verdict=stall.verdict.sentence)
