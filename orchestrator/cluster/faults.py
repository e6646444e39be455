"""What went wrong with a rank: as it arrives from Ray, and as a run hears of it."""

from __future__ import annotations

from dataclasses import dataclass

from ray.exceptions import RayError, RayTaskError

from pentad.schedules.ir.errors import PentadError

# Seconds to wait for a better culprit: a rank that lost its peers usually reports before the peer's death is known.
GRACE, GRACE_OF_VICTIM = 0.5, 0.3
VICTIM = ("connection closed", "connection reset", "connection refused", "socket closed", "broken pipe", "nccl", "gloo")


class WorkerError(PentadError):
    """Rank `rank` failed. `detail` is the whole account: a traceback, or what Ray knows of a death.

    `lost` are the ranks that are known to be gone or to be given up. `fault` is 'killed', 'error', 'hang' or 'node',
    `detector` is 'ray', 'peer', 'heartbeat' or 'deadline', as the journal has them; `after` are the seconds without
    progress before it was noticed, as far as known.
    """

    def __init__(
        self,
        message: str,
        rank: int,
        detail: str,
        lost: tuple[int, ...] = (),
        fault: str = "",
        detector: str = "",
        after: float = 0.0,
    ) -> None:
        super().__init__(message)
        self.rank, self.detail, self.lost, self.fault, self.detector = rank, detail, lost, fault, detector
        self.after = after


@dataclass(frozen=True)
class Failure:
    """One rank's error as it arrived."""

    rank: int
    error: RayError

    @property
    def died(self) -> bool:
        return not isinstance(self.error, RayTaskError)

    @property
    def victim(self) -> bool:
        """Whether this only tells that another rank is gone."""
        return not self.died and any(sign in str(self.error).lower() for sign in VICTIM)

    @property
    def cause(self) -> str:
        """One line."""
        if not self.died:
            error = getattr(self.error, "cause", self.error)
            return f"{type(error).__name__}: {' '.join(str(error).split())}"
        lines = str(self.error).strip().splitlines()
        told = " ".join(lines).partition("exit detail: ")[2] or lines[-1]
        if "connection error code 2" in told:  # Ray's word for an end without a word
            return "its process was killed or crashed"
        return " ".join(told.split()).rstrip(".")


def patience(failures: list[Failure]) -> float:
    """Seconds to wait for better news than these."""
    if any(failure.died for failure in failures):
        return 0.0
    return GRACE_OF_VICTIM if all(failure.victim for failure in failures) else GRACE
