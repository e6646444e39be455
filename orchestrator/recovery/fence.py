"""Ends a generation on its surviving ranks and collects the state that they hold.

A lost rank costs only its part of the steps in flight, as long as another rank holds the same stages or, with ZeRO, the
same shard of them (zero.shards). Otherwise that state survives only in the newest checkpoint. Every attempt increments
the generation, and workers refuse calls from earlier ones.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray

from pentad.orchestrator.cluster.faults import Superseded, WorkerError
from pentad.orchestrator.cluster.group import Member, WorkerGroup
from pentad.schedules.spec.plan import ParamShard, Plan, ShardPart
from pentad.schedules.spec.zero_layout import replica_groups
from pentad.workers.runtime.results import Evaluation, RankSnapshot, StepResult

FENCE_SECONDS, SNAPSHOT_SECONDS = 5.0, 10.0
STORING_SECONDS = 40.0  # enough for three requests to a store that answers late
Record = Callable[..., None]  # (event, **facts): writes a line of the journal


class CannotRecover(WorkerError):
    """No recovery is possible."""


@dataclass
class RecoveryState:
    """What survives of a generation: the newest weights, after `version` steps, are held by the ranks `current`; if
    no rank has any, `version` is -1.

    `results[step][rank]` are the results of completed steps, `evaluations` the newest ones by step, `lost[rank]` is why
    a rank was lost, and `seconds` has the duration of each phase of the recovery. If a rank was `corrupt`, only the
    state of a checkpoint counts. `spares` are the ranks whose places spare processes took.
    """

    version: int = 0
    current: tuple[int, ...] = ()
    results: dict[int, dict[int, StepResult]] = field(default_factory=dict)
    evaluations: dict[int, Evaluation] = field(default_factory=dict)
    lost: dict[int, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    corrupt: bool = False
    spares: tuple[int, ...] = ()

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Adds the duration of the block to a phase, unless the block fails."""
        began = time.monotonic()
        yield
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.monotonic() - began


def fence(group: WorkerGroup, state: RecoveryState, record: Record) -> None:
    """Ends the generation on every living rank and fills `state`; ranks that do not answer are added to `state.lost`.

    Raises Superseded if another driver has fenced a rank meanwhile.
    """
    began = time.monotonic()
    _await_storing(group, state.lost)
    group.generation += 1
    _call_living(group, state.lost, "fence", FENCE_SECONDS, record)
    if group.superseded:
        raise Superseded(f"another driver has taken over the ranks of {group.plan.name}: this one ends")
    if group.plan.device == "cuda":
        _call_living(group, state.lost, "abort", FENCE_SECONDS, record)
    kill(group, state.lost)
    snapshots: dict[int, RankSnapshot] = _call_living(group, state.lost, "leave", SNAPSHOT_SECONDS, record)
    kill(group, state.lost)
    state.version = max((snapshot.version for snapshot in snapshots.values()), default=-1)
    # A rank that lacks only the last step's global norm gets it from one that has taken it and still has the norm.
    # It no longer does if a former driver has already started it in another generation.
    late = [rank for rank, s in snapshots.items() if s.version == state.version - 1 and s.ready]
    done = [s for s in snapshots.values() if s.version == state.version and s.losses]
    calls = {rank: group.call_runner(rank, "advance", s.norm, s.losses) for s in done[:1] for rank in late}
    answers, _ = group.gather(calls, SNAPSHOT_SECONDS)
    newest = [rank for rank, s in snapshots.items() if s.version == state.version >= 0]  # -1: no state yet
    state.current = tuple(sorted([*newest, *answers]))
    for rank, snapshot in snapshots.items():
        for result in snapshot.results:
            state.results.setdefault(result.step, {})[rank] = result
        state.evaluations |= {each.step: each for each in snapshot.evaluations}
    seconds = time.monotonic() - began
    state.seconds["fence"] = state.seconds.get("fence", 0.0) + seconds
    record("fence", generation=group.generation, step=state.version, seconds=round(seconds, 3))


def _await_storing(group: WorkerGroup, lost: Iterable[int]) -> None:
    """Waits for ranks that are committing a checkpoint, so that slow storage does not make them count as lost."""
    refs = [ref for rank, ref in group.storing.items() if rank not in lost]
    if refs:
        ray.wait(refs, timeout=STORING_SECONDS)


def is_recordable(state: RecoveryState, done: int) -> bool:
    """Whether some rank has the results of every step after the `done` recorded ones, so that they can be recorded too.
    A driver records a step only after all ranks have taken it, and may have died in between."""
    return all(state.results.get(step) for step in range(done, state.version))


def is_complete(plan: Plan, state: RecoveryState) -> bool:
    """Whether the current ranks hold the newest state of every parameter shard; of its replicas, or the replicas of
    each of its ZeRO shards, one suffices."""
    if state.version < 0:  # an earlier recovery was interrupted before any rank had a state
        return False
    return all(newest for _, newest, _ in _parts(plan, state.current))


def sources(plan: Plan, current: Iterable[int]) -> dict[ShardPart, int]:
    """The current rank that sends the state of each part of a parameter shard that a rank outside `current` holds."""
    return {part: newest[0] for part, newest, stale in _parts(plan, current) if stale}


def handed_over(plan: Plan, current: Iterable[int]) -> dict[int, dict[int, ParamShard]]:
    """The parameter shards that each current rank hands over, by part number; together they are the full state. A part
    is a shard, or with ZeRO one of its shards."""
    found: dict[int, dict[int, ParamShard]] = {}
    for number, ((shard, _), newest, _) in enumerate(_parts(plan, current)):
        for rank in newest:
            found.setdefault(rank, {})[number] = shard
    return found


def owned(plan: Plan, current: Iterable[int]) -> dict[int, tuple[ParamShard, ...]]:
    """The parameter shards of which each current rank saves its part; together they are the state exactly once."""
    found: dict[int, tuple[ParamShard, ...]] = {}
    for (shard, _), newest, _ in _parts(plan, current):
        found[newest[0]] = (*found.get(newest[0], ()), shard)
    return found


def _parts(plan: Plan, current: Iterable[int]) -> Iterator[tuple[ShardPart, list[int], list[int]]]:
    """Every part of the state, with the ranks holding it that are current and those that are not."""
    known = set(current)
    for shard in plan.param_shards:
        for part, ranks in enumerate(replica_groups(plan, shard)):
            yield (
                (shard, part),
                [each for each in ranks if each in known],
                [each for each in ranks if each not in known],
            )


def kill(group: WorkerGroup, ranks: Iterable[int]) -> None:
    """Kills the processes of lost ranks: one that hangs might wake up later and write to a checkpoint."""
    this_node, lost = ray.get_runtime_context().get_node_id(), set(ranks)
    for rank in lost:
        place = group.places[rank]
        with suppress(Exception):
            ray.kill(group.actors[rank])
        if place.node == this_node:
            with suppress(ProcessLookupError):
                os.kill(place.pid, signal.SIGKILL)
            Path(place.progress_file).unlink(missing_ok=True)
        else:
            for neighbour in [other for other in group.neighbours(rank) if other not in lost][:1]:
                group.actors[neighbour].kill.remote(place.pid)


def end_processes(members: Iterable[Member]) -> None:
    """Ends living ranks that are no longer needed."""
    this_node = ray.get_runtime_context().get_node_id()
    for actor, place in members:
        with suppress(Exception):
            ray.kill(actor)
        if place.node == this_node:
            Path(place.progress_file).unlink(missing_ok=True)


def _call_living(
    group: WorkerGroup, lost: dict[int, str], method: str, seconds: float, record: Record
) -> dict[int, Any]:
    """The answers of the ranks that are not lost; those that do not answer are added to `lost`."""
    living = [rank for rank in range(len(group.actors)) if rank not in lost]
    refs = {rank: getattr(group.actors[rank], method).remote(group.generation) for rank in living}
    answers, missing = group.gather(refs, seconds)
    for rank, cause in missing.items():
        lost[rank] = cause
        record("lost", generation=group.generation, rank=rank, fault="killed", detector="heartbeat", cause=cause)
    return answers
