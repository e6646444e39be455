"""The checkpoints of one generation: ranks write their parts while the next steps run, and then one rank commits."""

from __future__ import annotations

import time
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import partial
from typing import Any, Literal, NamedTuple

from pentad.orchestrator.cluster.faults import WorkerError
from pentad.orchestrator.cluster.group import STATUS_SECONDS, Refs, Tick, WorkerGroup
from pentad.orchestrator.cluster.rank_status import Status
from pentad.orchestrator.config.config import RunConfig
from pentad.orchestrator.monitoring.evaluations import best_of
from pentad.orchestrator.monitoring.event_bus import EventBus
from pentad.orchestrator.monitoring.run_state import ControlRequests
from pentad.orchestrator.recovery.retention import kept_steps
from pentad.orchestrator.run.bit_checks import BitChecks
from pentad.schedules.ir.errors import PentadError
from pentad.workers.background import in_daemon
from pentad.workers.checkpoint.location import Location
from pentad.workers.runtime.results import Committed, WrittenShards

SYNC_SECONDS = 0.5  # a working disk syncs lines within this time; the ranks have more steps in flight than that
DISCARD_SECONDS = 5.0  # working storage deletes files within this time
POLL_SECONDS = 0.1


class Save(NamedTuple):
    """A checkpoint after `step` steps, with `facts` for the journal. In turn, all ranks of a generation write it, the
    run's folder syncs the records of its steps (`synced`), and one rank commits it and prunes older ones, or discards
    what was written. Nothing waits for one that `hangs`."""

    refs: Refs
    step: int
    began: float
    generation: int
    phase: Literal["write", "commit", "prune", "discard"] = "write"
    facts: dict[str, Any] = {}  # noqa: RUF012
    synced: Future[None] | None = None
    hangs: bool = False


class SaveHangs(Exception):
    """Storage accepts no data of a checkpoint."""


class Saving:
    """Saves one checkpoint at a time, the `current` one. `attempted` is the step of the newest one submitted, `durable`
    that of the newest one committed, and `saved_at` the monotonic second of the last submission or commit. `tick` is
    called while the driver waits."""

    def __init__(
        self,
        config: RunConfig,
        group: WorkerGroup,
        bus: EventBus,
        requests: ControlRequests,
        checks: BitChecks,
        saved: int,
        saved_at: float,
        tick: Tick,
        hanging: Save | None = None,
    ) -> None:
        self.config, self.group, self.bus, self.requests = config, group, bus, requests
        self.checks, self.tick = checks, tick
        self.attempted = self.durable = saved
        self.saved_at = saved_at
        self.current = hanging  # the next one waits for it, or is skipped
        self.waited = 0.0  # seconds that training has waited for it
        self.chunks: dict[int, int] = {}  # chunks written so far, as each rank last reported
        self.idle, self.watched = 0.0, time.monotonic()  # seconds without progress, and when last checked

    @property
    def hangs(self) -> bool:
        return self.current is not None and self.current.hangs

    def submit(self, step: int) -> None:
        """Has the ranks copy their state once they reach `step`, and write it while they train on."""
        self.attempted, self.saved_at = step, time.monotonic()
        refs, facts = self.group.submit_save(self._path(step), step), {"waited_seconds": round(self.waited, 3)}
        self.current = Save(refs, step, self.saved_at, self.group.generation, facts=facts)
        self.waited = 0.0

    def continue_(self, done: int, required: int | None) -> None:
        """Advances the current checkpoint as far as possible without waiting, but never before all its steps are
        `done`: recorded, and not after a spike. Raises PentadError if the checkpoint of `required` steps cannot be
        saved."""
        while (save := self.current) is not None and self._is_over(save, done):
            self.current = self._next(save, done, required)

    def wait(self, done: int, required: int | None) -> None:
        """Continues until the checkpoint is committed, has failed, or hangs."""
        with suppress(SaveHangs):
            while (save := self.current) is not None:
                while save.synced is not None and not save.synced.done():
                    self.group.ping(partial(self._tick, save))
                    time.sleep(POLL_SECONDS)
                self.current = self._next(save, done, required)

    def watch(self, statuses: dict[int, Status], done: int) -> None:
        """Detects and reports a checkpoint that hangs, from the ranks' statuses; called about twice a second. Time
        counts only once the ranks have taken the checkpoint's steps, and while this process runs."""
        now, chunks = time.monotonic(), {rank: status.chunks for rank, status in statuses.items()}
        passed, self.watched = min(now - self.watched, 2 * STATUS_SECONDS), now
        is_moving, self.chunks = chunks != self.chunks, chunks
        save = self.current
        taken = max(done, min((status.step for status in statuses.values()), default=0))  # the next update may wait
        if save is None or save.hangs or taken < save.step or is_moving:
            self.idle = 0.0
            return
        self.idle += passed
        if self.idle > self.config.checkpoint.hang_seconds:
            self.current = save._replace(hangs=True)
            self.group.give_up_save(save.step)
            if save.phase == "prune":
                self.bus.display.note(f"older checkpoints are still there: {self._hang()}")
            else:
                self._note_failure(save.step, self._hang())

    def skip(self, step: int, *, is_last: bool = False) -> None:
        """Skips a checkpoint because an earlier one hangs. Raises PentadError if it is the last one of the run."""
        assert self.current is not None
        if is_last:
            raise PentadError(f"the last state, after step {step}, was not saved: {self._hang()}")
        self.attempted, self.saved_at = step, time.monotonic()
        self._note_failure(step, f"that of step {self.current.step} still hangs")

    def _hang(self) -> str:
        assert self.current is not None
        folder, synced = self.bus.folder, self.current.synced
        where = folder.checkpoints if synced is None or synced.done() else folder.path
        return f"{where} has taken nothing for checkpoint.hang_seconds = {self.config.checkpoint.hang_seconds:g}"

    def note_lost_rank(self) -> None:
        """Reports a checkpoint that a failed rank may not have written completely."""
        save = self.current
        if save is not None and save.phase == "write" and not save.hangs:
            with suppress(PentadError):  # the rank's failure matters more
                self._note_failure(save.step, "a rank failed before all had written it")

    def _is_over(self, save: Save, done: int) -> bool:
        is_synced = save.synced is None or save.synced.done()
        return done >= save.step and self.checks.vouches_for(save.step) and is_synced and self.group.is_ready(save.refs)

    def _next(self, save: Save, done: int, required: int | None) -> Save | None:
        """The next phase once the ranks have answered; None if there is none. Storage that is full, unreachable or
        unreadable is fatal only for the checkpoint of `required` steps."""
        if save.generation != self.group.generation:  # abandoned by its ranks: shows only that storage answers again
            self._note_answers()
            return None
        try:
            answers = self.group.collect(save.refs, tick=partial(self._tick, save))
            if save.phase == "write":
                return self._commit(save, answers, done)
            if save.phase == "commit":
                return self._record(save, *answers)
            if save.phase == "prune" and answers[0]:
                self.bus.display.note(f"older checkpoints are still there: {answers[0]}")
            if save.hangs:
                self._note_answers()
            return None
        except WorkerError:
            raise
        except PentadError as error:
            return self._failed(save, error, required)

    def _commit(self, save: Save, answers: list[WrittenShards | str], done: int) -> Save | None:
        """Commits what was written, or discards it if it hung or its steps follow a spike and no longer count."""
        if save.hangs:
            return self._discarding(save)
        for error in (answer for answer in answers if isinstance(answer, str)):
            raise PentadError(error)
        if done < save.step:
            return self._discarding(save)
        # A run that resumes from this checkpoint must find the records of all steps before it.
        synced = save.synced or in_daemon(self.bus.folder.files.sync)
        if not wait([synced], SYNC_SECONDS).done:
            return save._replace(synced=synced)
        synced.result()
        written = [answer for answer in answers if not isinstance(answer, str)]
        entries = [entry for answer in written for entry in answer.entries]
        snapshot = round(max(answer.snapshot_seconds for answer in written), 4)
        facts = {"bytes": sum(entry["bytes"] for entry in entries), "snapshot_seconds": snapshot, **save.facts}
        refs = self.group.submit_commit(self._path(save.step), save.step, entries)
        return save._replace(refs=refs, phase="commit", facts=facts, synced=synced)

    def _record(self, save: Save, committed: Committed) -> Save:
        self.saved_at = time.monotonic()
        seconds, generation = round(self.saved_at - save.began, 3), self.group.generation
        facts = {"seconds": seconds, "manifest": committed.manifest, **save.facts}
        self.bus.record("checkpoint", generation=generation, step=save.step, **facts)
        self.durable, evaluations = save.step, self.bus.folder.evaluations()
        saved = {step for step in committed.saved if step < save.step} | {save.step}
        best = best_of(evaluations, self.config.checkpoint.keep_best, saved)
        if best is not None and best.step == save.step:
            self.bus.record("best", generation=generation, step=save.step, loss=best.loss)
            self.bus.display.note(f"the checkpoint of step {save.step} is the best so far: loss {best.loss:.4f}")
        self.requests.checkpoint_saved(save.step)
        kept = kept_steps(self.config, saved, evaluations)
        refs = self.group.submit_beside("prune", self._path(save.step), self.config.checkpoint.keep, kept)
        return save._replace(refs=refs, phase="prune", hangs=False)

    def _discarding(self, save: Save) -> Save:
        """Has a rank delete what was written: the next checkpoint needs the space."""
        return save._replace(refs=self.group.submit_beside("discard", self._path(save.step)), phase="discard")

    def _discard(self, save: Save) -> None:
        """Deletes what was written at the end of the run, waiting for at most DISCARD_SECONDS."""
        if save.phase == "write":
            refs, until = self._discarding(save).refs, time.monotonic() + DISCARD_SECONDS
            while not self.group.is_ready(refs) and time.monotonic() < until:
                time.sleep(POLL_SECONDS)

    def _note_answers(self) -> None:
        self.bus.display.note("storage answers again: checkpoints are saved as usual")

    def _failed(self, save: Save, error: PentadError, required: int | None) -> Save | None:
        if self.requests.aborted:
            raise error
        if save.phase == "prune":
            self.durable = -1  # damaged when read back; whether an older one is intact is unknown
        if not save.hangs:  # a hang has been reported already
            if save.step == required:
                self._discard(save)
                raise PentadError(f"the last state, after step {save.step}, was not saved: {error}") from error
            self._note_failure(save.step, str(error))
        return self._discarding(save) if save.phase == "write" else None

    def _tick(self, save: Save, statuses: dict[int, Status]) -> None:
        """The tick while the driver waits for a checkpoint. Raises SaveHangs once it hangs."""
        self.tick(statuses)
        if self.hangs and not save.hangs:
            raise SaveHangs

    def _note_failure(self, step: int, error: str) -> None:
        self.bus.record("checkpoint failed", generation=self.group.generation, step=step, error=error)
        self.bus.display.note(f"no checkpoint of step {step}, training continues: {error}")

    def _path(self, step: int) -> Location:
        return self.bus.folder.checkpoint(step)
