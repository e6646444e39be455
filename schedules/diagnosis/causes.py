"""What makes a step long: candidate causes, each with the seconds that a replay of the step saves without it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from statistics import median
from typing import NamedTuple

import numpy as np

from pentad.schedules.diagnosis.attribution import STARVED
from pentad.schedules.diagnosis.replay import RECOMPUTE, Replay, Seconds
from pentad.schedules.diagnosis.step_view import BETWEEN_STAGES, COPIES, HOST, PARAMETERS
from pentad.schedules.ir.columns import Array

SLOWER = 1.03  # times its peers' compute, above which a rank is a candidate; likewise for links
WHOLE_PARTS = ("inside layers", BETWEEN_STAGES, PARAMETERS, "optimizer", RECOMPUTE, COPIES, "data", STARVED, HOST)


class Cause(NamedTuple):
    """`kind` is 'slow rank' (of `ranks`, `factor` times its peers' median), 'slow link' (from the first of `ranks` to
    the second, `factor` times the other links' median), 'uneven stages' (the busiest pipeline rank has `factor` times
    the mean), or a part of the step. The step would save `seconds` without it."""

    kind: str
    seconds: float
    ranks: tuple[int, ...] = ()
    factor: float = 0.0


def find_causes(replay: Replay, left: Mapping[str, float]) -> list[Cause]:
    """The causes that would save time, largest first. A part's cost is scaled to its share in `left` (0 to 1; default
    0)."""
    base = replay.makespan()
    found = [*_slow_ranks(replay, base), *_slow_links(replay, base), *_uneven_stages(replay, base)]
    found += [Cause(part, base - replay.scaled(part, left.get(part, 0.0))) for part in WHOLE_PARTS]
    return sorted((cause for cause in found if cause.seconds > 0), key=lambda cause: -cause.seconds)


def saved_by_clock(replay: Replay, factor: float) -> float:
    """Seconds that the step would save if all compute were `factor` times as fast."""
    return replay.makespan() - replay.makespan(partial(_faster, np.full(len(replay.rank), factor)))


def work_by_rank(replay: Replay) -> Array:
    """Compute seconds of every rank of the mesh, with recomputation but without waits inside layers or for a core."""
    return np.bincount(replay.rank, replay.parts["compute"] + replay.parts[RECOMPUTE], replay.view.mesh.size)


def _slow_ranks(replay: Replay, base: float) -> Iterator[Cause]:
    mesh, work = replay.view.mesh, work_by_rank(replay)
    for rank in range(mesh.size):
        peers = [other for other in mesh.group(("dp", "cp", "tp", "ep"), rank) if other != rank]
        if not peers or not (typical := median(work[peers].tolist())):
            continue
        if (factor := float(work[rank]) / typical) > SLOWER:
            factors = np.where(replay.rank == rank, factor, 1.0)
            yield Cause("slow rank", base - replay.makespan(partial(_faster, factors)), (rank,), factor)


def _slow_links(replay: Replay, base: float) -> Iterator[Cause]:
    received = replay.peer >= 0
    seconds = replay.parts[BETWEEN_STAGES]
    links = {(int(replay.peer[at]), int(replay.rank[at])): float(seconds[at]) for at in np.flatnonzero(received)}
    for (source, target), long in links.items():
        others = [each for link, each in links.items() if link != (source, target)]
        if not others or long <= (typical := median(others)) * SLOWER:
            continue
        where = received & (replay.peer == source) & (replay.rank == target)
        saved = base - replay.scaled(BETWEEN_STAGES, typical / long, where)
        yield Cause("slow link", saved, (source, target), long / typical if typical else np.inf)


def _uneven_stages(replay: Replay, base: float) -> Iterator[Cause]:
    view, work = replay.view, work_by_rank(replay)
    of_rank = np.array([at.pp for at in view.coordinates])
    if view.mesh.pp == 1:
        return
    by_stage = np.array([median(work[of_rank == pp].tolist()) for pp in range(view.mesh.pp)])
    mean = float(by_stage.mean())
    if not mean or not by_stage.all():
        return
    factors = by_stage / mean
    seconds = replay.makespan(partial(_faster, factors[of_rank[replay.rank]]))
    busiest = tuple(np.flatnonzero(of_rank == int(np.argmax(factors))).tolist())
    yield Cause("uneven stages", base - seconds, busiest, float(factors.max()))


def _faster(factors: Array, parts: Seconds) -> Seconds:
    """A copy with the work of every action divided by its factor."""
    return parts | {name: parts[name] / factors for name in ("compute", RECOMPUTE)}
