"""What can be seen of a run while it goes on, what can be asked of it, and who is told its news.

The driver's main thread writes; the control service, the exporter and others read from threads of their own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from pentad.schedules.simulate.timeline import Span
from pentad.schedules.spec.mesh import Coordinates

RUN_STATES = ("starting", "running", "paused", "recovering", "stopping", "finished", "stopped", "failed")
RANK_STATES = ("starting", "running", "waiting", "idle", "hung", "lost")


class RankView(NamedTuple):
    """One rank: `state` is one of RANK_STATES, `instruction` empty between steps, `gpu` -1 on a CPU.

    `heartbeat` is the monotonic second of this host at which the rank last answered.
    """

    rank: int
    coordinates: Coordinates
    node: str
    pid: int
    gpu: int
    state: str
    step: int
    instruction: str
    heartbeat: float


class RunView(NamedTuple):
    """The run: `state` is one of RUN_STATES, `step` the number of steps done, `program` its program's hash.

    `verdict` says for whom the run waits ('' while it does not). `endpoints` are 'control', 'metrics' (HOST:PORT) and
    'dashboard' (a URL), as far as there are any.
    """

    run: str
    folder: str
    state: str
    step: int
    steps: int
    generation: int
    mesh: str
    schedule: str
    program: str
    loss: float | None = None
    tokens_per_second: float | None = None
    verdict: str = ""
    ranks: tuple[RankView, ...] = ()
    endpoints: dict[str, str] = {}  # noqa: RUF012

    def plain(self) -> dict[str, Any]:
        """As `pentad status --json` prints it."""
        now = time.monotonic()
        ranks = [
            {
                "rank": r.rank,
                "pid": r.pid,
                "node": r.node,
                "gpu": r.gpu,
                "coordinates": r.coordinates._asdict(),
                "state": r.state,
                "step": r.step,
                "instruction": r.instruction,
                "heartbeat_age_seconds": round(max(0.0, now - r.heartbeat), 3),
            }
            for r in self.ranks
        ]
        return {**self._asdict(), "ranks": ranks}


class Watcher(Protocol):
    """Is told the news of a run, in the driver's main thread: it must not block, nor raise."""

    def plan(self, view: RunView) -> None:
        """The ranks are placed (again: after a recovery the mesh may be another one)."""

    def steps(self, rows: Sequence[dict[str, Any]], spans: Sequence[tuple[Span, ...]]) -> None:
        """Steps are done: their lines of metrics.jsonl, and each one's spans on this host's monotonic clock."""

    def view(self, view: RunView) -> None:
        """About once a second, and whenever the run's state changes."""

    def event(self, entry: dict[str, Any]) -> None:
        """A line of journal.jsonl as it is written."""

    def close(self) -> None:
        """The run is over."""


class ControlRequests:
    """What people ask of a run; the driver looks between two calls, and at `aborted` ten times a second."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.paused = self.stopping = self.aborted = False
        self._expected = self._saved = -1  # steps of the checkpoint asked for, and of the newest one
        self._over = False

    def pause(self) -> None:
        """No step begins until `resume`."""
        self._set(paused=True)

    def resume(self) -> None:
        self._set(paused=False)

    def stop(self) -> None:
        """End after the steps under way, with a checkpoint."""
        self._set(stopping=True)

    def abort(self) -> None:
        """End now, without a checkpoint."""
        self._set(aborted=True)

    def checkpoint(self, step: int, timeout_seconds: float) -> int | None:
        """Asks for a checkpoint of at least `step` steps; waits until one is committed and returns its steps.

        None when it takes longer, or the run ends without one.
        """
        with self._changed:
            self._expected = max(self._expected, step)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._saved >= step or self._over, timeout_seconds)
            return self._saved if self._saved >= step else None

    @property
    def wants_checkpoint(self) -> bool:
        """Whether a checkpoint is asked for that has not been committed."""
        return self._expected > self._saved

    def saved(self, step: int) -> None:
        """The driver committed a checkpoint of `step` steps."""
        with self._changed:
            self._saved = max(self._saved, step)
            self._changed.notify_all()

    def wait(self, timeout_seconds: float) -> None:
        """Until something is asked for, or the time is up."""
        with self._changed:
            self._changed.wait(timeout_seconds)

    def over(self) -> None:
        """The run has ended: nobody waits any longer."""
        with self._changed:
            self._over = True
            self._changed.notify_all()

    def _set(self, **what: bool) -> None:
        with self._changed:
            self.__dict__.update(what)
            self._changed.notify_all()
