"""Keeps the ranks busy: submits steps in calls of about a second, and whatever is due between them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from pentad.orchestrator.cluster.copies import GroupCopies
from pentad.orchestrator.cluster.faults import Refusal, WorkerError
from pentad.orchestrator.cluster.group import Refs, WorkerGroup
from pentad.orchestrator.cluster.rank_status import Status
from pentad.orchestrator.config.config import RunConfig
from pentad.orchestrator.monitoring.evaluations import evaluation_rows, newest_evaluation
from pentad.orchestrator.monitoring.event_bus import EventBus
from pentad.orchestrator.monitoring.run_state import ControlRequests
from pentad.orchestrator.recovery.hang_detection import HangDetector
from pentad.orchestrator.recovery.spikes import SpikeWatch
from pentad.orchestrator.run.bit_checks import BitChecks
from pentad.orchestrator.run.measure import History
from pentad.orchestrator.run.replication import Replication
from pentad.orchestrator.run.saving import Save, Saving
from pentad.orchestrator.run.shrink_save import ShrinkSave
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.spec.batch import batch_of
from pentad.workers.data.mixture import Mixture
from pentad.workers.integrity.result import RankCheck
from pentad.workers.runtime.results import Evaluation, StepResult

CALL_SECONDS = 1.0  # target length of a call
CALLS_IN_FLIGHT = 2  # so that the ranks never wait for the driver
PAUSE_SECONDS = 0.5


class Call(NamedTuple):
    """A call in flight on all ranks: steps, an evaluation, or a check for flipped bits. `step` is the number of steps
    submitted up to and including this call; `conclude` takes it, the results of all ranks, and the call's duration in
    seconds."""

    refs: Refs
    step: int
    conclude: Callable[[int, list[Any], float], None]
    began: float


class StepLoop:
    """The steps of one generation: from `first` to the last, or until a stop is requested, or until `should_regroup`,
    asked about twice a second, says that the ranks should be placed again or get other layers or another order.

    `done` steps are complete; the newest checkpoint has `saved` steps and was saved at the monotonic second `saved_at`;
    the newest evaluation came after `evaluated` steps. The mesh may have `shrunk`, and a checkpoint of an earlier
    generation may be `hanging`. Nothing is recorded after a spike that causes a rollback."""

    def __init__(
        self,
        config: RunConfig,
        group: WorkerGroup,
        bus: EventBus,
        requests: ControlRequests,
        first: int,
        saved: int,
        saved_at: float,
        copies: GroupCopies,
        should_regroup: Callable[[dict[int, Status]], tuple[int, ...] | None],
        shrunk: bool = False,
        hanging: Save | None = None,
    ) -> None:
        self.config, self.group, self.bus, self.requests = config, group, bus, requests
        self.should_regroup = should_regroup
        keep, clocks = config.metrics.timeline_steps, group.offsets
        self.history = History(group.plan, group.generation, keep=keep, offsets=clocks, device_name=group.device_name)
        self.mixture = Mixture(group.plan.data, group.plan.batch.sizes)
        self.first = self.done = self.submitted = first
        self.ended_with = -1  # step of the checkpoint submitted because this generation ends
        self.evaluated = newest_evaluation(bus.folder.evaluations())
        self.steps_per_call = 1
        self.in_flight: deque[Call] = deque()
        self.collected_at = time.monotonic()  # when the last call ended
        self.open = False  # the last step submitted is incomplete until another run call follows
        self.replication = Replication(config.elastic.replicate_every, copies, bus)
        self.shrink_save = ShrinkSave(config.checkpoint, group, self.replication, first, due=shrunk and first > saved)
        self.checks = BitChecks(config.elastic, group, bus, first)
        self.saving = Saving(config, group, bus, requests, self.checks, saved, saved_at, self._tick, hanging)
        self.spikes = SpikeWatch(config.spikes, requests)
        self.leaving: tuple[int, ...] | None = None  # see `Recovery.should_regroup`
        self.stop_announced = self.stall_reported = False
        self.hangs = HangDetector(group, config.elastic.hang_seconds, config.cluster.start_timeout_seconds)

    def run(self) -> None:
        """Runs the steps. Raises WorkerError if a rank fails, Refusal if one cannot continue, and PentadError if the
        last checkpoint cannot be written."""
        try:
            self.replication.begin_generation()
            self.shrink_save.begin_generation()
            self._run()
        except (WorkerError, Refusal):
            self.saving.note_lost_rank()
            raise

    def _run(self) -> None:
        while True:
            while len(self.in_flight) < CALLS_IN_FLIGHT and (call := self._submit()):
                self.in_flight.append(call)
            if self.in_flight:
                call = self.in_flight.popleft()
                results = self.group.collect(call.refs, tick=partial(self._tick, stepping=True))
                call.conclude(call.step, results, time.monotonic() - max(call.began, self.collected_at))
                self.collected_at = time.monotonic()  # the ranks are at the next call
            elif self.requests.paused and not self.ending:
                self._pause()
            elif self.saving.current is not None and not self.saving.hangs:
                self._wait_for_save()
            elif self._hands_over(self.submitted) and self.replication.making is not None:
                self.replication.continue_(self.done, wait=self._tick)
            else:
                break
        if self.saving.hangs and self.spikes.spike is None and self._save_due(self.submitted):
            self.saving.skip(self.submitted, is_last=self.is_last)

    @property
    def ending(self) -> bool:
        return self.regrouping or self.is_last

    @property
    def is_last(self) -> bool:
        """Whether this is the last generation, unless ranks fail."""
        return self.requests.stopping or self.submitted == self.config.run.steps

    @property
    def counted(self) -> int:
        """The steps done, apart from those that a rollback will undo."""
        return self.done if self.spikes.spike is None else self.spikes.spike

    @property
    def required(self) -> int | None:
        """The step whose checkpoint the run must not end without, if any."""
        return self.submitted if self.is_last else None

    @property
    def regrouping(self) -> bool:
        """Whether this generation ends because the ranks should be placed again."""
        return self.leaving is not None

    def add(self, steps: list[list[StepResult]], evaluations: Mapping[int, Evaluation]) -> None:
        """Records completed steps, [step][result], from whichever ranks have the results, and evaluations by step."""
        if steps and self.spikes.spike is None:
            self._record([row for step in steps for row in self.history.add([[result] for result in step])])
        recorded = newest_evaluation(self.bus.folder.evaluations())
        for step, each in sorted(evaluations.items()):
            if recorded < step <= self.done and self.spikes.spike is None:
                self.bus.evaluated(evaluation_rows(step, each.data_sets, each.seconds, self.group.generation), ())

    def _submit(self) -> Call | None:
        """Submits the next call, if there is one."""
        step = self.submitted
        if self.spikes.spike is not None:
            return self._close(step) if self.open else None
        ending, paused = self.ending, self.requests.paused
        due, evaluates = self._save_due(step), self._evaluation_due(step)
        if due and self.saving.hangs and not ending:
            self.saving.skip(step)
            due = False
        must_wait, checks = due and self.saving.current is not None, self.checks.due(step, saves=due)
        if self.open and (evaluates or checks or ending or paused or must_wait):  # all of these need complete steps
            return self._close(step)
        if checks:  # before the checkpoint: only a state that all agree on is saved
            self.checks.submitted = step
            return Call(self.group.submit_check(step), step, self._conclude_check, time.monotonic())
        if evaluates:  # before the checkpoint, which may turn out to be the best
            self.evaluated = step
            return Call(self.group.submit_evaluate(step), step, self._conclude_evaluation, time.monotonic())
        if must_wait:
            return None
        if due:
            self.ended_with = step if ending else self.ended_with
            self.shrink_save.pending = False
            self.saving.submit(step)
        self.replication.submit(step, required=ending and self._hands_over(step))
        if self.requests.wants_checkpoint and step == self.saving.durable and not self.in_flight:
            self.requests.checkpoint_saved(step)
        if ending or paused:
            return None
        periods = *self.saves_every, self.evaluates_every, self.replication.every, self.checks.every
        following = [(step // each + 1) * each for each in periods if each]
        limit = min([self.config.run.steps, *following])
        count = min(self.steps_per_call, limit - step)
        self.submitted += count
        is_first = step == self.first  # closed, so that its results arrive before the second call is done
        is_last = self.submitted == self.config.run.steps
        precedes_other = self._evaluation_due(self.submitted) or self.checks.due(self.submitted, saves=False)
        self.open = not (is_first or is_last or precedes_other)
        refs = self.group.submit_run(step, count, more=self.open)
        return Call(refs, self.submitted, self._conclude_steps, time.monotonic())

    def _close(self, step: int) -> Call:
        self.open = False
        return Call(self.group.submit_run(step, 0), step, self._conclude_steps, time.monotonic())

    @property
    def saves_every(self) -> list[int]:
        """The periods, in steps, of regular checkpoints."""
        section = self.config.checkpoint
        return [each for each in (section.every, section.keep_every) if each]

    def _save_due(self, step: int) -> bool:
        """Whether to save a checkpoint after `step` steps. Those by steps, and the last one, are due even while another
        one is being written: they wait for it."""
        if self.ending and self._is_unsaved(step):
            return (self.regrouping or self.config.checkpoint.at_end) and not self._hands_over(step)
        if step <= self.saving.attempted:
            return False
        if any(step % each == 0 for each in self.saves_every):
            return True
        seconds = self.config.checkpoint.every_seconds
        is_late = 0 < seconds <= time.monotonic() - self.saving.saved_at
        if self.saving.hangs:
            return is_late  # `skip` then reports it
        wanted = is_late or self.requests.wants_checkpoint or self.shrink_save.is_due(step)
        return wanted and self.saving.current is None

    def _is_unsaved(self, step: int) -> bool:
        """Whether a generation that ends after `step` steps has yet to submit their checkpoint."""
        is_tried = step == self.ended_with
        is_current = self.saving.current is not None and self.saving.current.step == step and not self.saving.hangs
        return step > self.saving.durable and not is_tried and not is_current

    def _hands_over(self, step: int) -> bool:
        """Whether this generation ends after `step` steps and the next one needs no checkpoint from it."""
        is_last = self.requests.stopping or step == self.config.run.steps
        if self.leaving is None or is_last or self.spikes.spike is not None:
            return False
        return not self.leaving or self.replication.hands_over(step, self.leaving)

    def _conclude_steps(self, _: int, results: list[list[StepResult]], __: float) -> None:
        """Records the completed steps, and adapts the number of steps per call."""
        if results[0] and self.spikes.spike is None:
            rows = self.history.add(results)
            self._record(rows)
            seconds = sum(row["step_seconds"] for row in rows) / len(rows)
            self.steps_per_call = max(1, min(4 * self.steps_per_call, int(CALL_SECONDS / seconds)))
        self.saving.continue_(self.counted, self.required)
        self.replication.continue_(self.done)

    @property
    def evaluates_every(self) -> int:
        return 0 if self.group.plan.eval is None else self.config.eval.every

    def _evaluation_due(self, step: int) -> bool:
        """Whether to evaluate the weights after `step` steps. A stop or a regrouping defers it."""
        if self.group.plan.eval is None or step <= self.evaluated or self.requests.stopping:
            return False
        is_due = self.config.eval.next_due(step, self.config.run.steps) == step
        return is_due and (not self.regrouping or step == self.config.run.steps)

    def _conclude_evaluation(self, step: int, results: list[Evaluation], seconds: float) -> None:
        """Records an evaluation; its time is not part of the next step."""
        rows = evaluation_rows(step, results[0].data_sets, seconds, self.group.generation)
        self.bus.evaluated(rows, self.history.add_evaluation(results))

    def _conclude_check(self, step: int, checks: list[RankCheck], seconds: float) -> None:
        """Concludes a check for flipped bits; its time is not part of the next step."""
        self.history.pause()
        self.checks.conclude(step, checks, seconds)

    def _record(self, rows: list[dict[str, Any]]) -> None:
        spans, rows = list(self.history.recent)[-len(rows) :], self.spikes.until_spike(rows)
        self.done = rows[-1]["step"] + 1
        self._record_changes(rows)
        rows = [row | {"batch": batch_of(row["step"], self.group.skipped_batches)} for row in rows]
        self.bus.steps_done(rows, spans[: len(rows)])
        self.spikes.react(rows)

    def _record_changes(self, rows: list[dict[str, Any]]) -> None:
        """Records in the journal where the mixture or the batch size changes."""
        sizes, generation = self.mixture.sizes, self.group.generation
        for row in rows:
            batch = batch_of(row["step"], self.group.skipped_batches)
            for change in self.mixture.changes(batch):
                self.bus.record("mixture", generation=generation, step=row["step"], **change)
            if batch and sizes.size(batch) != sizes.size(batch - 1):
                size = sizes.size(batch)
                self.bus.record("batch size", generation=generation, step=row["step"], global_batch_size=size)

    def _wait_for_save(self) -> None:
        """Waits for the current checkpoint, and so do the ranks: at the end, and if the next one by steps is due."""
        began = time.monotonic()
        self.history.pause()
        self.saving.wait(self.counted, self.required)
        self.saving.waited += 0.0 if self.ending else time.monotonic() - began

    def _pause(self) -> None:
        """Keeps the ranks waiting between two steps for PAUSE_SECONDS; called until a resume is requested."""
        if self.bus.view.state != "paused":
            self.bus.record("pause", generation=self.group.generation, step=self.done)
            self.bus.display.note(f"paused after step {self.done}; resume with `pentad resume {self.config.run.name}`")
            self.bus.set_state("paused")
        self.saving.continue_(self.counted, self.required)
        self.group.ping(self._tick)
        self.history.pause()
        self.requests.wait(PAUSE_SECONDS)
        if not self.requests.paused:
            self.bus.record("resume", generation=self.group.generation, step=self.done)
            self.bus.display.note("resumed")
            self.bus.set_state("running")

    def _tick(self, statuses: dict[int, Status], *, stepping: bool = False) -> None:
        """Shows what the ranks do during a call. Raises WorkerError if they hang."""
        if self.requests.aborted:
            raise PentadError("the run was aborted through its control service, without a checkpoint")
        if self.requests.stopping and not self.stop_announced:
            self.stop_announced = True
            self.bus.display.note("stopping after the steps in flight; once more stops at once, without a checkpoint")
            self.bus.set_state("stopping")
        self.saving.watch(statuses, self.done)
        if not self.regrouping:
            self.leaving = self.should_regroup(statuses)
        # With the optimizer state on the host, an update waits until a checkpoint has been written: no hang.
        is_written = self.saving.current is not None and not self.saving.hangs and self.group.plan.host_optimizer
        stall = self.hangs.check(statuses, self.history.measured, stepping=stepping and not is_written)
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
