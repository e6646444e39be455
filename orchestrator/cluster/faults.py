"""A rank's failure, as Ray reports it and as the run handles it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import ray
from ray.exceptions import ActorUnavailableError, RayError, RayTaskError

from pentad.orchestrator.cluster.gone_nodes import gone_nodes
from pentad.schedules.ir.errors import PentadError

if TYPE_CHECKING:
    from pentad.orchestrator.cluster.group import WorkerGroup

# Seconds to wait for the root cause of the first failure: a rank often reports a lost peer before Ray does.
GRACE, GRACE_OF_VICTIM = 0.5, 0.3
PING_SECONDS = 2.5  # for an answer: a busy machine may starve a rank for two seconds
PROBE_SECONDS = 0.2  # between two checks of the nodes of silent ranks
LOG_CHARACTERS = 10_000
VICTIM = ("connection closed", "connection reset", "connection refused", "socket closed", "broken pipe", "nccl", "gloo")
# Ray, CUDA and cuBLAS report a lack of memory only in the text of their errors.
MEMORY = ("out of memory", "outofmemory", "low on memory", "memoryerror", "alloc_failed")


class WorkerError(PentadError):
    """Rank `rank` failed. `detail` is the full account: a traceback, or what Ray knows about a death.

    `lost` are the ranks that are dead or must be given up. `fault` is 'killed', 'memory', 'error', 'hang', 'node',
    'drain', 'terminated', 'slow' or 'corrupt', and `detector` 'ray', 'peer', 'heartbeat', 'deadline', 'notice', 'times'
    or 'check', as in the journal; `stalled_seconds`, if known, passed without progress before the fault was detected.
    """

    def __init__(
        self,
        message: str,
        rank: int,
        detail: str,
        lost: tuple[int, ...] = (),
        fault: str = "",
        detector: str = "",
        stalled_seconds: float = 0.0,
    ) -> None:
        super().__init__(message)
        self.rank, self.detail, self.lost, self.fault, self.detector = rank, detail, lost, fault, detector
        self.stalled_seconds = stalled_seconds


class Refusal(PentadError):
    """A rank cannot continue for a reason other than a fault, such as unreadable data. The ranks keep their state."""


class Superseded(PentadError):
    """Another driver has taken over the ranks of this run: this one must end and leave them and the run's files
    alone."""


@dataclass(frozen=True)
class Failure:
    """One rank's error as Ray reports it."""

    rank: int
    error: RayError

    @property
    def died(self) -> bool:
        return not isinstance(self.error, RayTaskError)

    @property
    def says_nothing(self) -> bool:
        """Whether nothing on the rank's node has reported how it died."""
        return isinstance(self.error, ActorUnavailableError)

    @property
    def is_victim(self) -> bool:
        """Whether the error only says that another rank is gone."""
        return not self.died and any(sign in str(self.error).lower() for sign in VICTIM)

    @property
    def fault(self) -> str:
        """The kind of fault, as in WorkerError, or 'peer' for a victim."""
        if any(sign in self.cause.lower() for sign in MEMORY):
            return "memory"
        return "killed" if self.died else "peer" if self.is_victim else "error"

    @property
    def cause(self) -> str:
        """The cause in one line."""
        if not self.died:
            error = getattr(self.error, "cause", self.error)
            return f"{type(error).__name__}: {' '.join(str(error).split())}"
        if self.says_nothing:
            return "its process was killed or its node lost"
        lines = str(self.error).strip().splitlines()
        detail = " ".join(lines).partition("exit detail: ")[2] or lines[-1]
        if "connection error code 2" in detail:  # Ray's text for a process that vanished
            return "its process was killed or crashed"
        return " ".join(detail.split()).rstrip(".")


def output_of(pid: int, progress_file: str) -> str:
    """The end of a rank's output, if Ray's logs are on this node: a crash leaves its traceback there."""
    found = sorted(Path(progress_file).parent.glob(f"logs/worker-*-{pid}.*"))
    return "\n".join(f"{path.name}:\n{path.read_text(errors='replace')[-LOG_CHARACTERS:]}" for path in found)


def grace_seconds(failures: list[Failure]) -> float:
    """Seconds to wait for another failure that explains these."""
    if any(failure.died for failure in failures):
        return 0.0
    return GRACE_OF_VICTIM if all(failure.is_victim for failure in failures) else GRACE


def error_of(group: WorkerGroup, failures: Sequence[Failure]) -> PentadError:
    """The error to raise for these failures: a PentadError raised by a worker as a Refusal with its text, else a
    WorkerError that says which rank failed, where and why."""
    if gone := _gone_with_nodes(group, [failure.rank for failure in failures if failure.says_nothing]):
        return _silent_error(group, gone, "ray", ended=True)
    if all(failure.is_victim for failure in failures):
        silent, ended = unresponsive(group)
        if silent:
            return _silent_error(group, silent, "peer", ended=ended)
    culprit = min(failures, key=lambda f: (not f.died, f.is_victim))
    error = getattr(culprit.error, "cause", None)
    if isinstance(error, PentadError):
        return Refusal(str(error))
    status = group.last_status(culprit.rank, lives=not culprit.died)
    where = f" at step {status.step}" if status and status.step >= 0 else ""
    doing = f" in {status.instruction}" if status and status.instruction else ""
    verb = "died" if culprit.died else "failed"
    message = f"{group.label(culprit.rank)} {verb}{where}{doing}: {culprit.cause}"
    at = group.places[culprit.rank] if group.places else None
    detail = f"{culprit.error}\n{output_of(at.pid, at.progress_file) if at else ''}"
    lost = tuple(failure.rank for failure in failures if not failure.is_victim)
    detector = "peer" if culprit.is_victim else "ray"
    return WorkerError(message, culprit.rank, detail, lost, culprit.fault, detector)


def unresponsive(group: WorkerGroup) -> tuple[tuple[int, ...], bool]:
    """(ranks whose nodes are gone, True); without such nodes (those that do not answer within PING_SECONDS, False)."""
    refs = {rank: actor.clock.remote() for rank, actor in enumerate(group.actors)}
    until = time.monotonic() + PING_SECONDS
    while True:
        _, late = ray.wait(list(refs.values()), num_returns=len(refs), timeout=PROBE_SECONDS)
        answers, _ = group.gather(refs, 0.0)
        silent = tuple(rank for rank in refs if rank not in answers)
        gone = _gone_with_nodes(group, silent)
        if gone or not late or time.monotonic() > until:
            return gone or silent, bool(gone)


def _gone_with_nodes(group: WorkerGroup, ranks: Iterable[int]) -> tuple[int, ...]:
    """All ranks on those nodes of `ranks` that are gone, whether in `ranks` or not."""
    gone = gone_nodes({group.places[rank].node for rank in ranks} if group.places else ())
    return tuple(rank for rank, place in enumerate(group.places) if place.node in gone)


def _silent_error(group: WorkerGroup, ranks: tuple[int, ...], detector: str, *, ended: bool) -> WorkerError:
    names, many = ", ".join(map(group.label, ranks)), len(ranks) > 1
    on_nodes = f"and Ray has ended on the{'ir nodes' if many else ' node'}"
    reason = on_nodes if ended else "after other ranks lost their connections"
    text = f"{names} {'do' if many else 'does'} not answer, {reason}"
    return WorkerError(text, ranks[0], text, ranks, "node", detector)
