"""The last steps of a run in Ray's own dashboard: Jobs > the job > Task Timeline > Download, for Perfetto.

Ray draws a slice for every profile event of a task. So each rank gets a few made-up tasks, and what it computed becomes
their profile events, sent to Ray's control store (GCS) with the times that were measured. A replica is a process
('Node pentad dp0'), a rank a thread ('worker:0003' is rank 3). Transfers and collectives are left out: they run beside
compute, and slices of one thread must nest. The run folder's trace has them, with arrows.
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import grpc
import ray

from pentad.orchestrator.watch import RunView
from pentad.schedules.mesh import Coordinates
from pentad.schedules.palette import look
from pentad.schedules.timeline import Span

REST_SECONDS = 1.0  # least time between two pushes
SHARE = 0.02  # most of the pusher's time that pushes take
DEADLINE_SECONDS = 2.0
KEPT_SPANS = 1000  # newest profile events that Ray keeps of a task: later ones push them out
MOST_TASKS = 500  # in the job's list of tasks, and so the GCS keeps half a million spans at most
LANE = "compute"
# Ray's dashboard looks a slice's colour up by the names of its own events: the name that gives a colour.
EVENT_OF_COLOUR = {
    "rail_response": "task",
    "rail_idle": "task:store_outputs",
    "rail_load": "task:deserialize_arguments",
    "rail_animation": "task:execute",
}


class Row(NamedTuple):
    """A rank's thread: process title, the bytes whose hexadecimal form is the rank, 'dp0 pp3', its number in the job."""

    process: str
    thread: bytes
    name: str
    number: int


class Step(NamedTuple):
    """What a rank did in a step, and the task that is to tell it."""

    row: Row
    slot: int
    number: int
    spans: tuple[Span, ...]


class RayTimeline:
    """A Watcher. What goes wrong is said once, by `note`, in the thread that calls; the run goes on without."""

    def __init__(self, keep: int, note: Callable[[str], None]) -> None:
        """At least the last `keep` steps stay in Ray, as far as a rank has not more than KEPT_SPANS spans in a step."""
        self._keep, self._note = keep, note
        self._offset = time.time_ns() - time.monotonic_ns()
        self._rows: dict[int, Row] = {}
        self._numbers: dict[Coordinates, int] = {}
        self._pending: deque[tuple[dict[int, Row], tuple[Span, ...]]] = deque(maxlen=keep)
        self._changed = threading.Condition()
        self._closing = False
        self._trouble: str | None = None
        self._said = False
        self._thread: threading.Thread | None = None

    def plan(self, view: RunView) -> None:
        rows = {}
        for rank in sorted(view.ranks, key=lambda rank: rank.coordinates):
            if rank.coordinates in self._numbers or len(self._numbers) < MOST_TASKS:
                number = self._numbers.setdefault(rank.coordinates, len(self._numbers))
                name = str(rank.coordinates)
                rows[rank.rank] = Row(f"pentad dp{rank.coordinates.dp}", _thread(rank.rank), name, number)
        self._rows = rows

    def steps(self, rows: Sequence[dict[str, Any]], spans: Sequence[tuple[Span, ...]]) -> None:
        if self._keep and self._rows:
            with self._changed:
                self._pending.extend((self._rows, step) for step in spans)
                self._changed.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="ray-timeline", daemon=True)
                self._thread.start()
        self._tell()

    def view(self, view: RunView) -> None:
        self._tell()

    def event(self, entry: dict[str, Any]) -> None:
        pass

    def close(self) -> None:
        """Pushes what is left, for DEADLINE_SECONDS at most."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(DEADLINE_SECONDS)
        self._tell()

    def _tell(self) -> None:
        if self._trouble and not self._said:
            self._said = True
            self._note(f"no timeline in the Ray dashboard: {self._trouble}")

    def _work(self) -> None:
        try:
            pusher = Pusher(self._keep, self._offset)
            while batch := self._next():
                began = time.monotonic()
                try:
                    pusher.push(batch)
                except grpc.RpcError as error:  # the next one may get through
                    self._trouble = f"{error.code().name}, {error.details()}"
                seconds = time.monotonic() - began
                self._rest(max(REST_SECONDS - seconds, seconds / SHARE - seconds))
            pusher.finish()
        except Exception as error:  # Ray's interface is not the one expected
            self._trouble = f"{type(error).__name__}: {error}"

    def _next(self) -> list[tuple[dict[int, Row], tuple[Span, ...]]]:
        """The newest steps as soon as there are any; none when the run is over."""
        with self._changed:
            self._changed.wait_for(lambda: self._pending or self._closing)
            batch = list(self._pending)
            self._pending.clear()
            return batch

    def _rest(self, seconds: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._closing, seconds)
