"""Finds the newest intact checkpoint of a run and restores it on the ranks.

The driver checks manifests and sizes, the ranks the checksums of what they read. If a rank finds a checkpoint damaged,
the driver reads all of it before giving it up: the rank may be wrong."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from pentad.orchestrator.cluster.group import STATUS_SECONDS, Tick, WorkerGroup
from pentad.orchestrator.cluster.rank_status import Status
from pentad.orchestrator.monitoring.event_bus import EventBus
from pentad.orchestrator.recovery.retention import looked_up, open_current, require_listed
from pentad.schedules.ir.errors import PentadError
from pentad.workers.checkpoint.checkpoint import (
    Checkpoint,
    Start,
    Unreadable,
    open_checkpoint,
    recover,
)
from pentad.workers.checkpoint.checksums import Damaged
from pentad.workers.checkpoint.location import Location
from pentad.workers.checkpoint.retention import delete_checkpoint

RETRY_SECONDS = 0.05
T = TypeVar("T")


class NewestIntact:
    """The search of one recovery, or of the start of a run. Waits `seconds` for storage that does not answer."""

    def __init__(self, bus: EventBus, seconds: float, *, restart: bool) -> None:
        """`restart`: it is no error if all checkpoints are damaged."""
        self.bus, self.seconds, self.restart = bus, seconds, restart
        self.damaged: dict[Location, str] = {}  # found by the driver, and why

    def saved(self) -> list[int]:
        """Steps of the valid checkpoints, lowest first."""
        return self._answered(partial(looked_up, self.bus.folder.saved, self.seconds))

    def delete(self, step: int) -> None:
        """Deletes a checkpoint. Raises PentadError if storage fails or hangs."""
        limit = max(self.seconds, self.bus.folder.config.checkpoint.hang_seconds)
        looked_up(partial(delete_checkpoint, self.bus.folder.checkpoint(step)), limit)

    def find(self) -> Checkpoint | None:
        """The newest intact checkpoint; damaged newer ones are renamed. Raises as `recover` does, and PentadError if
        the journal has checkpoints and there are none."""
        folder = self.bus.folder
        read = partial(recover, folder.checkpoints, self.restart, self._open)
        found, refused = self._answered(partial(looked_up, read, self.seconds))
        if found is None and not refused and not folder.config.checkpoint.restart_if_damaged:
            require_listed(folder.checkpoints, folder.journal())
        for aside, reason in refused:
            self.bus.record("checkpoint refused", renamed=aside.name, cause=reason)
            self.bus.display.note(f"checkpoint refused and renamed to {aside.name}: {reason}")
        return found

    def restore(self, group: WorkerGroup, start: Start, tick: Tick | None = None) -> bool:
        """Restores `start` on all ranks. False if that checkpoint is damaged: then `find` finds another one.

        Raises PentadError if a rank finds damaged what the driver finds intact, and for a damaged checkpoint of another
        run.
        """
        try:
            self._answered(partial(group.restore, start, tick if start.folder is None else self.moving(tick)))
        except Damaged as error:
            if start.folder is None or start.folder.parent != self.bus.folder.checkpoints:
                raise
            if self.is_intact(start.folder):
                expected = "expected the same bytes on every host"
                raise PentadError(f"{error}, but the driver finds {start.folder} intact: {expected}") from None
            return False
        return True

    def is_intact(self, folder: Location) -> bool:
        """Reads all of a checkpoint; `find` skips one that is damaged."""
        try:
            self._answered(partial(looked_up, partial(self._read, folder), self.seconds))
        except Unreadable:
            raise
        except PentadError as error:
            self.damaged[folder] = str(error)
            return False
        return True

    def moving(self, tick: Tick | None) -> Tick:
        """A tick that raises PentadError once no rank has read or written anything for too long."""
        limit = max(self.seconds, self.bus.folder.config.checkpoint.hang_seconds)
        idle, checked, seen = 0.0, time.monotonic(), dict[int, int]()

        def check(statuses: dict[int, Status]) -> None:
            nonlocal idle, checked, seen
            if tick is not None:
                tick(statuses)
            now, chunks = time.monotonic(), {rank: status.chunks for rank, status in statuses.items()}
            idle = idle + min(now - checked, 2 * STATUS_SECONDS) if chunks == seen else 0.0
            checked, seen = now, chunks
            if idle > limit:
                raise PentadError(f"{self.bus.folder.checkpoints} stood still for {limit:g} s: expected an answer")

        return check

    def _read(self, folder: Location) -> None:
        open_checkpoint(folder)
        open_current(self.bus.folder, folder)

    def _open(self, folder: Location) -> Checkpoint:
        if folder in self.damaged:
            raise PentadError(self.damaged[folder])
        return open_current(self.bus.folder, folder)

    def _answered(self, call: Callable[[], T]) -> T:
        """The result of the call, repeated while storage does not answer. Raises Unreadable after `seconds`."""
        until, said = time.monotonic() + self.seconds, False
        while True:
            try:
                return call()
            except Unreadable as error:
                if time.monotonic() > until:
                    raise
                if not said:
                    self.bus.display.note(f"trying again for {self.seconds:g} s: {error}")
                    said = True
            time.sleep(RETRY_SECONDS)
