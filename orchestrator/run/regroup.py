"""After a fault: frees the living ranks, replaces the lost or makes do without them, and hands the newest state on.

A rank that is lost takes its part of the step under way along, and nothing else, as long as another rank holds the same
stages; a shard of them (zero.stage) is in the newest checkpoint only. The generation's number grows with every attempt;
what comes late from an earlier one is refused by the workers.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray

from pentad.orchestrator.cluster.faults import WorkerError
from pentad.orchestrator.cluster.group import WorkerGroup
from pentad.orchestrator.cluster.placement import living_bundles
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.spec.plan import ParamShard, Plan
from pentad.workers.runtime.results import RankSnapshot, StepResult

FENCE_SECONDS, LEAVE_SECONDS, HIRE_SECONDS = 5.0, 10.0, 30.0
Tell = Callable[..., None]  # event, facts: a line of the journal


@dataclass
class RecoveryState:
    """What is left of a generation: `version` steps are in the newest weights, those of the ranks `current`.

    `results[step][rank]` are accounts of steps done. `seconds` are by phase.
    """

    version: int = 0
    current: tuple[int, ...] = ()
    results: dict[int, dict[int, StepResult]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    def took(self, phase: str, since: float) -> None:
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.monotonic() - since


def fence(group: WorkerGroup, lost: dict[int, str], stock: RecoveryState, tell: Tell) -> None:
    """Ends the generation on every living rank and takes stock; ranks that do not follow are `lost` as well, with a
    cause.

    Raises PentadError when no rank is left.
    """
    began = time.monotonic()
    group.generation += 1
    _ask(group, lost, "fence", FENCE_SECONDS, tell)
    if group.plan.device == "cuda":
        _ask(group, lost, "abort", FENCE_SECONDS, tell)
    kill(group, lost)
    stands: dict[int, RankSnapshot] = _ask(group, lost, "leave", LEAVE_SECONDS, tell)
    kill(group, lost)
    if not stands:
        raise PentadError("no rank is left of the run; the same command resumes from the newest checkpoint")
    stock.version = max(stand.version for stand in stands.values())
    late = [r for r, stand in stands.items() if stand.version == stock.version - 1 and stand.ready]
    norm = next(stand.norm for stand in stands.values() if stand.version == stock.version)
    answers, _ = group.gather({r: _order(group, r, "advance", norm) for r in late}, LEAVE_SECONDS)
    newest = [r for r, s in stands.items() if s.version == stock.version and stock.version >= 0]  # -1: no state yet
    stock.current = tuple(sorted(newest + list(answers)))
    for rank, stand in stands.items():
        for result in stand.results:
            stock.results.setdefault(result.step, {})[rank] = result
    stock.took("fence", began)
    tell("fence", generation=group.generation, step=stock.version, seconds=round(time.monotonic() - began, 3))


def complete(plan: Plan, stock: RecoveryState) -> bool:
    """Whether the ranks that are current hold every share: one holder of each will do, but all where they hold a shard
    each."""
    if stock.version < 0:  # a recovery was cut short before any rank had a state again
        return False
    current = set(stock.current)
    return all(len(current.intersection(plan.holders(share))) >= plan.shards(share) for share in plan.shares)


def sources(plan: Plan, current: Iterable[int]) -> dict[ParamShard, int]:
    """Share -> the current rank that gives its state, for the shares that a rank which is not current holds."""
    newest = set(current)
    behind = {share for rank in range(plan.mesh.size) if rank not in newest for share in plan.shares_of(rank)}
    return {share: min(newest.intersection(plan.holders(share))) for share in sorted(behind)}


def refill(group: WorkerGroup, lost: dict[int, str], seconds: float, pause: Callable[[float], None]) -> bool:
    """Hires a rank for each that is lost, in its old place or where Ray has moved that; False when not all are placed
    within seconds. `pause` passes the time."""
    until = time.monotonic() + seconds
    while True:
        missing = set(lost)
        if all(group.bundles[rank] in living_bundles(group.placement) for rank in missing):
            hired = {rank: group.hire(rank) for rank in missing}
            places, failed = group.gather({r: a.where.remote() for r, a in hired.items()}, HIRE_SECONDS)
            if not failed:
                for rank, actor in hired.items():
                    group.seat(rank, actor, places[rank])
                return True
            for actor in hired.values():
                ray.kill(actor)
        if time.monotonic() >= until:
            return False
        pause(0.2)


def kill(group: WorkerGroup, ranks: Iterable[int]) -> None:
    """Ends the processes of ranks that are given up: one that hangs may wake up and write where it must not."""
    here = ray.get_runtime_context().get_node_id()
    for rank in ranks:
        at, actor = group.places[rank], group.actors[rank]
        with suppress(Exception):
            ray.kill(actor)
        if at.node == here:
            with suppress(ProcessLookupError):
                os.kill(at.pid, signal.SIGKILL)
            Path(at.board).unlink(missing_ok=True)
        else:
            near = (r for r, place in enumerate(group.places) if place.node == at.node and r not in set(ranks))
            for other in near:
                group.actors[other].kill.remote(at.pid)
                break


def _order(group: WorkerGroup, rank: int, method: str, *arguments: Any) -> Any:
    return group.actors[rank].do.remote(group.generation, method, *arguments)


def _ask(group: WorkerGroup, lost: dict[int, str], what: str, seconds: float, tell: Tell) -> dict[int, Any]:
    """Answers of the ranks that are not lost; those that give none are lost from now on."""
    living = [rank for rank in range(len(group.actors)) if rank not in lost]
    if what == "leave":
        refs = {rank: _order(group, rank, what) for rank in living}
    else:
        refs = {rank: getattr(group.actors[rank], what).remote(group.generation) for rank in living}
    answers, missing = group.gather(refs, seconds)
    for rank, cause in missing.items():
        lost[rank] = cause
        tell("lost", generation=group.generation, rank=rank, fault="killed", detector="heartbeat", cause=cause)
    return answers


def as_fault(group: WorkerGroup, error: PentadError) -> WorkerError:
    """A recovery that failed without a culprit: those that do not answer are it. Raises it when all do."""
    if isinstance(error, WorkerError):
        return error
    silent = group.silent()
    if not silent:
        raise error
    return WorkerError(str(error), silent[0], str(error), silent, "node", "heartbeat")
