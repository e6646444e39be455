"""ZB-1p and ZB-2p: the best order found for given costs and memory (Qi et al. 2023, arXiv 2401.10241, section 3.1)."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush
from itertools import accumulate, product
from math import inf

import numpy as np

from pentad.schedules.generators.orders import numbered, streams
from pentad.schedules.generators.zb_greedy import NEVER, Knobs, Line, greedy, ticks
from pentad.schedules.generators.zero_bubble import zb_h1, zb_h2
from pentad.schedules.ir.columns import CODE
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.ir.instruction import Op
from pentad.schedules.ir.program import Streams
from pentad.schedules.simulate.costs import Costs
from pentad.schedules.spec.schedule_spec import ScheduleSpec


def zb_1p(shape: ScheduleSpec) -> Streams:
    """With the memory of 1F1B, unless `shape.limit` says otherwise. Raises PentadError if that is less than 1."""
    return zb_auto(shape, "zb-1p", shape.ranks)


def zb_2p(shape: ScheduleSpec) -> Streams:
    """With twice the memory of 1F1B, unless `shape.limit` says otherwise. Raises PentadError if that is less than 1."""
    return zb_auto(shape, "zb-2p", 2 * shape.ranks)


def zb_auto(shape: ScheduleSpec, name: str = "zb-auto", usual: float = inf) -> Streams:
    """One stage a rank; of all orders tried the one with the least `longest`, then makespan, then memory.

    No rank keeps more than `shape.limit` microbatches of activations (`usual` where that is None). Never slower than
    ZB-H1 or ZB-H2 where they keep to the limit too. Without `shape.costs` F, B and W take equally long. Raises
    PentadError if the limit is less than 1.
    """
    limit = usual if shape.memory_limit is None else shape.memory_limit
    if not limit >= 1:
        raise PentadError(f"schedule {name}: memory limit is {limit:g}, but at least 1 microbatch a rank is needed")
    costs = shape.costs or Costs.uniform(shape.ranks)
    lines = _lines(costs, shape.ranks, shape.microbatches, min(limit, shape.microbatches))
    best = min(lines, key=lambda line: (*line.spans(), line.peak))
    op = np.array([list(map(CODE.__getitem__, ops)) for ops in best.streams])
    stage = np.broadcast_to(np.arange(shape.ranks)[:, None], op.shape)
    return streams(op, stage, numbered(op, shape.microbatches))


def _lines(costs: Costs, ranks: int, microbatches: int, limit: float) -> Iterator[Line]:
    each = ticks(costs, ranks)
    for knobs in product((False, True), repeat=3):
        yield greedy(Line(each, microbatches, limit), Knobs(*knobs))
    for backward, eager in product((False, True), repeat=2):
        yield _as_they_come(Line(each, microbatches, limit), backward, eager)
    for known in (zb_h1, zb_h2):
        streams = [[unit.parts[0].op for unit in known(rank, ranks, microbatches)] for rank in range(ranks)]
        if max(map(_peak, streams)) <= limit:
            yield _replay(Line(each, microbatches, limit), streams)


def _as_they_come(line: Line, backward: bool, eager: bool) -> Line:
    """List scheduling: a free rank runs what has come. Better than rounds where stages differ or the limit is low."""
    turns = [(0, rank) for rank in range(line.ranks)]
    while turns:
        now, rank = heappop(turns)
        if now < line.clock[rank]:
            continue  # busy; its next turn is set
        op, then = _choice(line, rank, now, backward, eager)
        if op:
            line.run(rank, op)
            then = line.clock[rank]
            if op is Op.F and rank + 1 < line.ranks:
                heappush(turns, (then + line.hops_f[rank + 1], rank + 1))
            if op is Op.B and rank > 0:
                heappush(turns, (then + line.hops_b[rank - 1], rank - 1))
        if then < NEVER:
            heappush(turns, (then, rank))
    return line


def _choice(line: Line, rank: int, now: int, backward: bool, eager: bool) -> tuple[Op | None, int]:
    """What a free rank runs now; if nothing, until when it waits. `backward`: B goes before F. `eager`: W may delay
    them."""
    excess, pending = line.excess(rank), line.pending[rank]
    forwards = line.activation(rank) if excess <= pending else NEVER
    backwards = line.gradient(rank)
    if backwards <= now and (backward or forwards > now or excess > 0):
        return Op.B, now
    if forwards <= now:
        return Op.W if excess > 0 else Op.F, now
    if pending and (eager or now + line.weight[rank] <= min(forwards, backwards)):
        return Op.W, now
    return None, min(forwards, backwards)


def _replay(line: Line, streams: list[list[Op]]) -> Line:
    """Runs given streams, each rank as far as its inputs are made before the next one's turn."""
    done = [0] * line.ranks
    while sum(done) < sum(map(len, streams)):
        for rank, ops in enumerate(streams):
            while done[rank] < len(ops) and _ready(line, rank, ops[done[rank]]):
                line.run(rank, ops[done[rank]])
                done[rank] += 1
    return line


def _ready(line: Line, rank: int, op: Op) -> bool:
    return op is Op.W or (line.activation(rank) if op is Op.F else line.gradient(rank)) < NEVER


def _peak(ops: list[Op]) -> float:
    """Most microbatches of activations kept at once."""
    return max(accumulate(1.0 if op is Op.F else -0.5 for op in ops))
