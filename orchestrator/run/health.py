"""Whether the ranks get on, and if not, for whom they wait."""

from __future__ import annotations

import time
from typing import NamedTuple

from pentad.orchestrator.cluster.faults import WorkerError
from pentad.orchestrator.cluster.group import STATUS_SECONDS, WorkerGroup
from pentad.orchestrator.cluster.worker import Status
from pentad.schedules.simulate.costs import Costs
from pentad.schedules.verify.hang_diagnosis import Diagnosis, Position, find_cause

SILENT_SECONDS = 2.0  # an idle rank answers within milliseconds
QUIET_SECONDS = 2.0  # after which a person wants to know for whom the run waits
LONGEST = 10  # a deadline allows this many times the longest instruction that was measured


class Stall(NamedTuple):
    """Nothing moved for `seconds`; `causes` are the ranks to give up once `late`."""

    seconds: float
    late: bool
    verdict: Diagnosis
    causes: tuple[int, ...]


class Health:
    """Looks at the ranks' positions again and again.

    Time counts only while this process looks: on a machine that stood still as a whole no rank is late.
    """

    def __init__(self, group: WorkerGroup, hang_seconds: float, first_seconds: float) -> None:
        self.group, self.hang_seconds, self.first_seconds = group, hang_seconds, first_seconds
        self.before: dict[int, tuple[int, int]] = {}
        self.quiet, self.looked, self.stepping = 0.0, time.monotonic(), False

    def deadline(self, costs: Costs | None) -> float:
        """Seconds without progress that are too long; `costs` None: nothing has been measured yet."""
        if costs is None:
            return max(self.first_seconds, self.hang_seconds)
        longest = max(*costs.forward, *costs.backward, *costs.weight, costs.reduce, costs.norm, costs.step)
        return self.hang_seconds + LONGEST * longest

    def look(self, statuses: dict[int, Status], costs: Costs | None, *, stepping: bool) -> Stall | None:
        """None while something moves. `stepping`: the ranks have been told to run steps."""
        now = time.monotonic()
        passed, self.looked = min(now - self.looked, 2 * STATUS_SECONDS), now
        positions = {rank: (status.step, status.counter) for rank, status in statuses.items()}
        moved = positions != self.before or stepping != self.stepping
        self.before, self.stepping = positions, stepping
        silent = self._silent(now)
        rests = not stepping and not silent  # between steps, at a checkpoint or in a pause
        self.quiet = 0.0 if moved or rests else self.quiet + passed
        if self.quiet < QUIET_SECONDS:
            return None
        verdict = self._verdict(statuses)
        causes = _causes(verdict, silent, self.group.plan.mesh.size)
        return Stall(self.quiet, self.quiet > self.deadline(costs), verdict, causes)

    def fault(self, stall: Stall) -> WorkerError:
        """The error of a run whose ranks stand still."""
        rank = stall.causes[0] if stall.causes else 0
        detector = "heartbeat" if rank in self._silent(time.monotonic()) else "deadline"
        text = f"no rank got on for {stall.seconds:.0f} s: {stall.verdict.sentence}"
        return WorkerError(text, rank, text, stall.causes, "hang", detector, stall.seconds)

    def _silent(self, now: float) -> set[int]:
        heard = self.group.heard
        return {rank for rank in range(len(self.group.actors)) if now - heard.get(rank, now) > SILENT_SECONDS}

    def _verdict(self, statuses: dict[int, Status]) -> Diagnosis:
        plan = self.group.plan
        none = Status(self.group.generation, -1, "", 0.0)
        found = [self.group.peek(rank) or statuses.get(rank, none) for rank in range(plan.mesh.size)]
        return find_cause(plan.program, plan.mesh, [Position(s.step, s.counter, s.age) for s in found])


def _causes(verdict: Diagnosis, silent: set[int], ranks: int) -> tuple[int, ...]:
    """Ranks that do not even answer, of those that lack nothing if there are such: what a frozen process has sent may
    not have left it, and then its partner seems to lack nothing. Of all ranks at once none is the cause."""
    quiet = tuple(rank for rank in verdict.roots if rank in silent) or tuple(sorted(silent))
    return quiet or (() if len(verdict.roots) == ranks else verdict.roots)
