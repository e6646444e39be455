"""The visible state of a run, the requests that users can make, and the base class of watchers.

The driver's main thread writes the state; the control service, the exporter and others read it in their own threads.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

from pentad.schedules.diagnosis.rank_times import RankTime
from pentad.schedules.simulate.timeline import Span
from pentad.schedules.spec.mesh import Coordinates
from pentad.workers.runtime.telemetry import GpuState

RUN_STATES = ("starting", "running", "paused", "recovering", "stopping", "finished", "stopped", "failed")
OVER = ("finished", "stopped", "failed")  # states in which a run has no ranks
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


class EvalView(NamedTuple):
    """The last evaluation of a data set, after `step` steps; `loss` is None if it was not finite."""

    data: str
    step: int
    loss: float | None


class RunView(NamedTuple):
    """The run: `state` is one of RUN_STATES, `step` the number of steps done, `program` the hash of its program.

    `verdict` says which rank a stalled run waits for, and which ranks are slow or were wrong; otherwise ''.
    `endpoints` may have 'control' and 'metrics' (HOST:PORT), 'dashboard' and 'page' (URLs). The next evaluation is due
    after `next_evaluation` steps (None: no more are). `spares` processes wait to take the place of a lost rank. The
    remaining steps take `seconds_left` at the pace of the last ones, without evaluations; None if unknown.
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
    evaluations: tuple[EvalView, ...] = ()
    next_evaluation: int | None = None
    spares: int = 0
    seconds_left: float | None = None


def makes_progress(view: RunView) -> bool:
    """Whether the run is live and not waiting for the replacement of a lost rank."""
    waits = view.state == "recovering" and any(rank.state == "lost" for rank in view.ranks)
    return view.state not in OVER and not waits


class Watcher:
    """Is notified of a run's events, in the driver's main thread. Its methods must neither block nor raise."""

    def on_ranks_placed(self, view: RunView) -> None:
        """Called at the start and after every recovery, perhaps with another mesh."""
        self.on_view(view)

    def on_steps(self, rows: Sequence[dict[str, Any]], spans: Sequence[tuple[Span, ...]]) -> None:
        """Completed steps: their rows of metrics.jsonl, and the spans of each on this host's monotonic clock."""

    def on_rank_times(self, times: tuple[RankTime, ...]) -> None:
        """Seconds of the ranks in a completed step, by op and stage; after `on_steps`."""

    def on_evaluation(self, rows: Sequence[dict[str, Any]], spans: tuple[Span, ...]) -> None:
        """A completed evaluation: its rows of eval.jsonl, and the spans of its last round, as in `on_steps`."""

    def on_rewind(self, step: int) -> None:
        """This step and later ones will run again; their rows have been removed from metrics.jsonl."""

    def on_view(self, view: RunView) -> None:
        """Called about twice a second, and whenever the run's state changes."""

    def on_gpu_states(self, states: dict[int, GpuState]) -> None:
        """New readings of the ranks' GPUs, by rank, about twice a second."""

    def on_event(self, entry: dict[str, Any]) -> None:
        """A new line of journal.jsonl."""

    def close(self) -> None:
        """The run is over."""


class ControlRequests:
    """What users request of a run. The driver checks it between calls to the ranks, and `aborted` also during them."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.paused = self.stopping = self.aborted = False
        self._requested = self._saved = -1  # step of the checkpoint requested, and of the newest one committed
        self._over = False

    def pause(self) -> None:
        """Has no further step begin until `resume`."""
        self._set(paused=True)

    def resume(self) -> None:
        self._set(paused=False)

    def stop(self) -> None:
        """Ends the run after the steps in flight, with a checkpoint."""
        self._set(stopping=True)

    def abort(self) -> None:
        """Ends the run now, without a checkpoint."""
        self._set(aborted=True)

    def checkpoint(self, step: int, timeout_seconds: float) -> int | None:
        """Requests a checkpoint of at least `step` steps, waits until one is committed, and returns its step.

        None if it takes longer than `timeout_seconds` or the run ends without one.
        """
        with self._changed:
            self._requested = max(self._requested, step)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._saved >= step or self._over, timeout_seconds)
            return self._saved if self._saved >= step else None

    @property
    def wants_checkpoint(self) -> bool:
        """Whether a requested checkpoint has not been committed yet."""
        return self._requested > self._saved

    def checkpoint_saved(self, step: int) -> None:
        """Notes that a checkpoint of `step` steps has been committed."""
        with self._changed:
            self._saved = max(self._saved, step)
            self._changed.notify_all()

    def wait(self, timeout_seconds: float) -> None:
        """Waits until a request arrives or the time is up."""
        with self._changed:
            self._changed.wait(timeout_seconds)

    def close(self) -> None:
        """Releases all waiting callers: the run has ended."""
        with self._changed:
            self._over = True
            self._changed.notify_all()

    def _set(self, **flags: bool) -> None:
        with self._changed:
            self.__dict__.update(flags)
            self._changed.notify_all()
