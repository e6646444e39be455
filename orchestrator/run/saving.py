"""The checkpoints of one generation: ranks write their parts beside the next steps, and then one of them commits."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, TypeVar

from pentad.orchestrator.cluster.faults import WorkerError
from pentad.orchestrator.cluster.group import STATUS_SECONDS, Refs, Tick, WorkerGroup
from pentad.orchestrator.cluster.rank_status import Status
from pentad.orchestrator.config.config import RunConfig
from pentad.orchestrator.monitoring.evaluations import Best
from pentad.orchestrator.monitoring.event_bus import EventBus
from pentad.orchestrator.monitoring.run_state import ControlRequests
from pentad.orchestrator.recovery.retention import pinned_checkpoints
from pentad.orchestrator.run.bit_checks import BitChecks
from pentad.schedules.ir.errors import PentadError
from pentad.workers.checkpoint.checkpoint import fingerprint
from pentad.workers.checkpoint.retention import discard

T = TypeVar("T")


class Save(NamedTuple):
    """A checkpoint after `step` steps that is written by all ranks, and then, when it `commits`, committed by one, with
    these facts for the journal; `best` is the best checkpoint then. Nobody waits any more for one that `hangs`."""

    refs: Refs
    step: int
    began: float
    commits: bool = False
    facts: dict[str, Any] = {}  # noqa: RUF012
    best: Best | None = None
    hangs: bool = False


class SaveHangs(Exception):
    """Storage takes nothing of a checkpoint."""


class Saving:
    """One checkpoint at a time, the `current` one. The newest one submitted has `attempted` steps, and the newest one
    committed `durable`; at the monotonic second `saved_at` one was last submitted or committed. `tick` is called while
    the driver waits."""

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
        self.written: dict[int, int] = {}  # what ranks last said of it
        self.idle, self.watched = 0.0, time.monotonic()  # seconds without a change until then

    @property
    def hangs(self) -> bool:
        return self.current is not None and self.current.hangs

    def submit(self, step: int) -> None:
        """Has the ranks copy their state once they are that far, and write it while they train on."""
        self.attempted, self.saved_at = step, time.monotonic()
        refs = self.group.submit_save(self.bus.folder.checkpoint(step), step)
        self.current = Save(refs, step, self.saved_at, facts={"waited_seconds": round(self.waited, 3)})
        self.waited = 0.0

    def continue_(self, done: int, required: int | None) -> None:
        """Commits a checkpoint that all ranks have written, and records one that is committed; never before all of its
        steps are `done`: recorded, and not after a spike. Raises PentadError if that of `required` steps cannot be
        saved."""
        if (save := self.current) is not None and not save.commits and self._is_over(save, done):
            self._commit(save, done, required)
        if (save := self.current) is not None and save.commits and self._is_over(save, done):
            self._conclude(save, required)

    def wait(self, done: int, required: int | None) -> None:
        """`continue_` until the checkpoint is committed, has failed, or hangs."""
        with suppress(SaveHangs):
            if (save := self.current) is not None and not save.commits:
                self._commit(save, done, required)
            if (save := self.current) is not None:
                self._conclude(save, required)

    def watch(self, statuses: dict[int, Status], done: int) -> None:
        """Finds a checkpoint that hangs, and says so; with the ranks' statuses, about twice a second. Time counts once
        the ranks have taken its steps, and only while this process runs."""
        now, written = time.monotonic(), {rank: status.written for rank, status in statuses.items()}
        passed, self.watched = min(now - self.watched, 2 * STATUS_SECONDS), now
        is_moving, self.written = written != self.written, written
        save = self.current
        taken = max(done, min((status.step for status in statuses.values()), default=0))  # an update may wait for it
        if save is None or save.hangs or taken < save.step or is_moving:
            self.idle = 0.0
            return
        self.idle += passed
        if self.idle > self.config.checkpoint.hang_seconds:
            self.current = save._replace(hangs=True)
            self.group.give_up_save(save.step)
            self._note_failure(save.step, self._hang())

    def skip(self, step: int, *, is_last: bool = False) -> None:
        """Instead of `submit`, while a checkpoint hangs. Raises PentadError if it is the last one of the run."""
        assert self.current is not None
        if is_last:
            raise PentadError(f"the last state, after step {step}, was not saved: {self._hang()}")
        self.attempted, self.saved_at = step, time.monotonic()
        self._note_failure(step, f"that of step {self.current.step} still hangs")

    def _hang(self) -> str:
        seconds = self.config.checkpoint.hang_seconds
        return f"{self.bus.folder.checkpoints} has taken nothing for checkpoint.hang_seconds = {seconds:g}"

    def note_lost_rank(self) -> None:
        """A rank has failed, perhaps before it had written its part."""
        save = self.current
        if save is not None and not save.commits and not save.hangs:
            with suppress(PentadError):  # the failure of the rank is what counts
                self._note_failure(save.step, "a rank failed before all had written it")

    def _is_over(self, save: Save, done: int) -> bool:
        return done >= save.step and self.checks.vouches_for(save.step) and self.group.is_ready(save.refs)

    def _commit(self, save: Save, done: int, required: int | None) -> None:
        self.current = self._or_note(save, partial(self._submit_commit, save, done), required)

    def _conclude(self, save: Save, required: int | None) -> None:
        manifest = self._or_note(save, partial(self._manifest, save), required)
        self.current, self.saved_at = None, time.monotonic()
        if manifest is not None:
            self._record(save, manifest)

    def _submit_commit(self, save: Save, done: int) -> Save | None:
        """Waits for the files and submits the commit; None for steps after a spike, which no longer count, and for a
        checkpoint that was given up."""
        answers = self.group.collect(save.refs, tick=partial(self._tick, save))
        if save.hangs:
            self._discard(save)
            self.bus.display.note(f"{self.bus.folder.checkpoints} answers again: checkpoints are saved as usual")
            return None
        for error in (answer for answer in answers if isinstance(answer, str)):
            raise PentadError(error)
        if done < save.step:
            self._discard(save)
            return None
        self.bus.folder.files.sync()  # a run that resumes there has the records of all steps before
        entries = [entry for answer in answers for entry in answer.entries]
        pinned = pinned_checkpoints(self.config, self.bus.folder, save.step)
        path, keep = self.bus.folder.checkpoint(save.step), self.config.checkpoint.keep
        refs = self.group.submit_commit(path, save.step, entries, keep, pinned)
        snapshot = round(max(answer.snapshot_seconds for answer in answers), 4)
        facts = {"bytes": sum(entry["bytes"] for entry in entries), "snapshot_seconds": snapshot, **save.facts}
        return save._replace(refs=refs, commits=True, facts=facts, best=self.bus.folder.best(save.step))

    def _manifest(self, save: Save) -> str:
        """Waits for the commit; returns the hash of what has been committed."""
        for reason in filter(None, self.group.collect(save.refs, tick=partial(self._tick, save))):
            self.bus.display.note(f"older checkpoints are still there: {reason}")
        return fingerprint(self.bus.folder.checkpoint(save.step))

    def _record(self, save: Save, manifest: str) -> None:
        seconds, generation = round(time.monotonic() - save.began, 3), self.group.generation
        facts = {"seconds": seconds, "manifest": manifest, **save.facts}
        self.bus.record("checkpoint", generation=generation, step=save.step, **facts)
        self.durable = save.step
        if save.best is not None and save.best.step == save.step:
            self.bus.record("best", generation=generation, step=save.step, loss=save.best.loss)
            self.bus.display.note(f"the checkpoint of step {save.step} is the best so far: loss {save.best.loss:.4f}")
        self.requests.checkpoint_saved(save.step)

    def _or_note(self, save: Save, action: Callable[[], T], required: int | None) -> T | None:
        """What the action returns; None when the storage is full, away or cannot be read, which is fatal only for the
        checkpoint of `required` steps."""
        try:
            return action()
        except WorkerError:
            raise
        except PentadError as error:
            if self.requests.aborted:
                raise
            if save.hangs:
                return None  # which has been noted
            if save.step == required:
                raise PentadError(f"the last state, after step {save.step}, was not saved: {error}") from error
            if not save.commits:
                self._discard(save)
            self._note_failure(save.step, str(error))
            return None

    def _tick(self, save: Save, statuses: dict[int, Status]) -> None:
        """Raises SaveHangs once the checkpoint does, for which the driver waits."""
        self.tick(statuses)
        if self.hangs and not save.hangs:
            raise SaveHangs

    def _note_failure(self, step: int, error: str) -> None:
        self.bus.record("checkpoint failed", generation=self.group.generation, step=step, error=error)
        self.bus.display.note(f"no checkpoint of step {step}, training continues: {error}")

    def _discard(self, save: Save) -> None:
        """Deletes what has been written of a checkpoint that will not be: the next one needs the room."""
        with suppress(PentadError):
            discard(self.bus.folder.checkpoint(save.step))
