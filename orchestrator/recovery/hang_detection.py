"""Detects hangs: whether the ranks make progress, and if not, which of them hold the others up."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

from pentad.orchestrator.cluster.faults import WorkerError
from pentad.orchestrator.cluster.group import STATUS_SECONDS, Tick, WorkerGroup
from pentad.orchestrator.cluster.rank_status import Status, streams_of
from pentad.schedules.ir.instruction import COLLECTIVES, RECEIVES, Action, Instruction
from pentad.schedules.simulate.costs import Costs
from pentad.schedules.spec.mesh import LAYER_AXES
from pentad.schedules.spec.plan import Plan
from pentad.schedules.verify.hang_diagnosis import GROUP_AXES, Diagnosis, Position, find_cause

AWAITED = {*RECEIVES, *COLLECTIVES}
SILENT_SECONDS = 2.0  # a healthy rank answers within milliseconds
# Without progress before the user sees which rank the run waits for; a first step compiles kernels.
REPORT_SECONDS, FIRST_REPORT_SECONDS = 2.0, 15.0
SLOWER = 10  # an instruction may take this many times its measured seconds longer than elastic.hang_seconds


class Stall(NamedTuple):
    """No rank has made progress for `seconds`; if `late`, it is a hang and the ranks `causes` are to be given up."""

    seconds: float
    late: bool
    verdict: Diagnosis
    causes: tuple[int, ...]


class HangDetector:
    """Compares the ranks' positions from one check to the next.

    Time counts only while this process runs, so that no rank is late after the machine was suspended.
    """

    def __init__(self, group: WorkerGroup, hang_seconds: float, first_seconds: float) -> None:
        self.group, self.hang_seconds, self.first_seconds = group, hang_seconds, first_seconds
        self.seen: dict[int, tuple[int, int, int, int, str]] = {}
        self.stalled, self.checked, self.stepping = 0.0, time.monotonic(), False

    def deadline(self, costs: Costs | None, at: Sequence[tuple[int, Action | None]] = ()) -> float:
        """Seconds without progress that mean a hang. `at` has the pipeline rank and the action of each rank to blame
        (None: between steps); the longest action counts or, if any has no measured time, the longest instruction of
        all. `costs` None: nothing has been measured yet."""
        if costs is None:
            return max(self.first_seconds, self.hang_seconds)
        seconds = [_action_seconds(costs, pp, action) for pp, action in at]
        if not seconds or not all(seconds):
            seconds = [*costs.forward, *costs.backward, *costs.weight, *costs.reduce, *costs.gather]
            seconds += [costs.norm, costs.step]
        return self.hang_seconds + SLOWER * max(seconds)

    def check(self, statuses: dict[int, Status], costs: Costs | None, *, stepping: bool) -> Stall | None:
        """None while there is progress. `stepping`: the ranks have steps to run."""
        now = time.monotonic()
        passed, self.checked = min(now - self.checked, 2 * STATUS_SECONDS), now
        seen = {rank: (s.step, s.counter, s.program, s.waits, s.axis) for rank, s in statuses.items()}
        moved = seen != self.seen or stepping != self.stepping
        self.seen, self.stepping = seen, stepping
        silent = self._silent(now)
        is_idle = not stepping and not silent  # between steps, at a checkpoint or paused
        self.stalled = 0.0 if moved or is_idle else self.stalled + passed
        if self.stalled < self._report_seconds(costs):
            return None
        number, positions = self._positions(statuses)
        plan = self.group.plan
        axes = GROUP_AXES if plan.batch.capacity else LAYER_AXES
        verdict = find_cause(plan.programs[number], plan.mesh, positions, silent, axes)
        causes = _causes(verdict, silent, plan.mesh.size)
        late = self.stalled > self.deadline(costs, _actions(plan, number, positions, causes))
        return Stall(self.stalled, late, verdict, causes)

    def _report_seconds(self, costs: Costs | None) -> float:
        return REPORT_SECONDS if costs is not None else min(FIRST_REPORT_SECONDS, self.deadline(None))

    def fault(self, stall: Stall) -> WorkerError:
        """The error for ranks that hang."""
        rank = stall.causes[0] if stall.causes else 0
        detector = "heartbeat" if rank in self._silent(time.monotonic()) else "deadline"
        text = f"no rank made progress for {stall.seconds:.0f} s: {stall.verdict.sentence}"
        return WorkerError(text, rank, text, stall.causes, "hang", detector, stall.seconds)

    def _silent(self, now: float) -> set[int]:
        last = self.group.last_heard
        return {rank for rank in range(len(self.group.actors)) if now - last.get(rank, now) > SILENT_SECONDS}

    def _positions(self, statuses: dict[int, Status]) -> tuple[int, list[Position]]:
        plan = self.group.plan
        unknown = Status(self.group.generation, -1, "", 0.0)
        found = [self.group.peek(rank) or statuses.get(rank, unknown) for rank in range(plan.mesh.size)]
        return positions_in_program(plan, found)


def positions_in_program(plan: Plan, statuses: Sequence[Status]) -> tuple[int, list[Position]]:
    """(number of the program that the rank furthest behind is in, every rank's position in it).

    An evaluation after `step` steps comes before step `step`, and its rounds count as the steps of its program. Ranks
    in another program have yet to begin this one or have left it: they are between steps.
    """
    evaluates = [plan.programs[status.program].forward_only for status in statuses]
    places = [(status.step, not inside) for status, inside in zip(statuses, evaluates, strict=True)]
    active = [number for number, status in enumerate(statuses) if status.counter >= 0]
    if len({statuses[number].program for number in active}) <= 1 and not any(evaluates):
        number = statuses[active[0]].program if active else 0
        return number, [Position(s.step, s.counter, s.age, s.waits, s.axis) for s in statuses]
    first = min(active, key=places.__getitem__, default=0)
    number, behind = statuses[first].program, places[first]
    is_evaluation, positions = plan.programs[number].forward_only, []
    for rank, (place, status) in enumerate(zip(places, statuses, strict=True)):
        step, counter = status.step, status.counter
        if place < behind:
            step, counter = -1 if is_evaluation else behind[0] - 1, -1
        elif place > behind:
            step, counter = sys.maxsize if is_evaluation else behind[0] + 1, -1
        elif is_evaluation:
            actions = len(streams_of(plan, rank)[number])
            step, counter = divmod(counter, actions) if counter >= 0 else (sys.maxsize, -1)
        inside = (status.waits, status.axis) if counter >= 0 else ()
        positions.append(Position(step, counter, status.age, *inside))
    return number, positions


def check_answers(group: WorkerGroup, seconds: float) -> Tick:
    """A tick that raises WorkerError for ranks that have not answered for `seconds`: nothing else detects a hang while
    state is transferred."""
    began = time.monotonic()

    def check(statuses: dict[int, Status]) -> None:
        limit = time.monotonic() - seconds
        heard = {rank: max(began, group.last_heard.get(rank, began)) for rank in range(len(group.actors))}
        silent = tuple(rank for rank, last in heard.items() if last < limit)
        if silent:
            text = f"{', '.join(map(group.label, silent))} stopped answering during a recovery"
            raise WorkerError(text, silent[0], text, silent, "hang", "heartbeat")

    return check


def _actions(
    plan: Plan, number: int, positions: Sequence[Position], ranks: Sequence[int]
) -> list[tuple[int, Action | None]]:
    """The pipeline rank and current action of each of `ranks` (all if empty) in a program of the plan."""
    found = []
    for rank in ranks or range(plan.mesh.size):
        pp, counter = plan.mesh.coordinates(rank).pp, positions[rank].counter
        found.append((pp, plan.programs[number].streams[pp][counter] if counter >= 0 else None))
    return found


def _action_seconds(costs: Costs, pp: int, action: Action | None) -> float:
    """Measured seconds of an action, plus the longest transfer or collective that it waits for; 0: not measured."""
    if action is None:
        return 0.0
    own = sum(costs.seconds_on(pp, part) for part in action.parts)
    awaited = [costs.seconds(Instruction(key.op, key.stage)) for key in action.waits if key.op in AWAITED]
    return own + max(awaited, default=0.0) if own else 0.0


def _causes(verdict: Diagnosis, silent: set[int], ranks: int) -> tuple[int, ...]:
    """The silent ranks, preferably those among the diagnosis's causes; without any, the diagnosis's causes, or none if
    they are all ranks. Data that a frozen process has sent may not have left it: its receiver then looks like the
    cause."""
    causes = tuple(rank for rank in verdict.causes if rank in silent) or tuple(sorted(silent))
    return causes or (() if len(verdict.causes) == ranks else verdict.causes)
