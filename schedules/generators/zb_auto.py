"""ZB-1p and ZB-2p: the best order found for given costs and memory (Qi et al. 2023, arXiv 2401.10241, section 3.1)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from heapq import heappop, heappush
from itertools import count
from math import inf

import numpy as np

from pentad.schedules.generators.arrays import occurrence_index, streams_from_arrays
from pentad.schedules.generators.best_of import Candidate, best_of
from pentad.schedules.generators.zb_auto_greedy import (
    NEVER,
    ROUNDS,
    B,
    F,
    Pipeline,
    Run,
    W,
    followed,
    greedy_candidates,
    tick_costs,
    warm_up,
)
from pentad.schedules.generators.zb_h import zb_h1, zb_h2
from pentad.schedules.ir.columns import Columns
from pentad.schedules.simulate.costs import Costs
from pentad.schedules.spec.schedule_spec import ScheduleSpec

EVENTS = 16  # per rank between two bounds


def zb_1p(spec: ScheduleSpec) -> Columns:
    """The best order within the memory of 1F1B, unless `spec.memory_limit` is set."""
    return zb_auto(spec, spec.ranks)


def zb_2p(spec: ScheduleSpec) -> Columns:
    """The best order within twice the memory of 1F1B, unless `spec.memory_limit` is set."""
    return zb_auto(spec, 2 * spec.ranks)


def zb_auto(spec: ScheduleSpec, default_limit: float = inf) -> Columns:
    """The best order of those tried, with one stage per rank: the least `longest`, then makespan, then memory.

    No rank saves more than `spec.memory_limit` microbatches of activations, at least 1 (None: `default_limit`). Never
    slower than ZB-H1 or ZB-H2 if they keep to the limit too. Without `spec.costs`, F, B and W cost the same.
    """
    costs = spec.costs or Costs.uniform(spec.ranks)
    tried = _candidates(costs, spec.ranks, spec.microbatches, most_saved(spec, default_limit))
    best = best_of(tried, lambda pipeline: (*pipeline.durations(), pipeline.peak))
    op = np.array(best.streams)
    stage = np.broadcast_to(np.arange(spec.ranks)[:, None], op.shape)
    return streams_from_arrays(op, stage, occurrence_index(op, spec.microbatches))


def most_saved(spec: ScheduleSpec, default: float) -> float:
    """The most microbatches of activations that a rank may save."""
    return min(default if spec.memory_limit is None else spec.memory_limit, spec.microbatches)


def _candidates(costs: Costs, ranks: int, microbatches: int, limit: float) -> Iterator[Candidate[Pipeline]]:
    ticks = tick_costs(costs, ranks)
    begin = partial(Pipeline, ticks, microbatches, limit)
    begun = [warm_up(begin(), extra_warm_up=extra).streams for extra in (False, True)]
    for extra in (False, True)[: 1 + (begun[0] != begun[1])]:
        yield from greedy_candidates(begin, extra_warm_up=extra)
    for backward_first in (False, True):
        yield from list_candidates(begin, backward_first=backward_first)
    for streams in _published(ranks, microbatches, limit):
        yield _replay(begin(), [deque(ops) for ops in streams])


def _published(ranks: int, microbatches: int, limit: float) -> Iterator[list[list[int]]]:
    """ZB-H1 and ZB-H2, if they keep to the limit."""
    for known in (zb_h1, zb_h2):
        op = known(ScheduleSpec(ranks, microbatches)).op.reshape(ranks, -1)
        saved = np.where(op == F, 2, -1).cumsum(axis=1)  # in halves: B frees one, W the other
        if saved.max() <= 2 * limit:
            yield op.tolist()


def list_candidates(begin: Callable[[], Pipeline], *, backward_first: bool) -> Iterator[Candidate[Pipeline]]:
    """Candidates without and with `eager_weight`, which share one run for as long as the option has changed nothing."""
    lazy, eager = (
        Run(begin(), partial(list_schedule, backward_first=backward_first, eager_weight=each)) for each in (False, True)
    )
    return map(followed, (lambda: lazy if eager.pipeline.eager_mattered else eager, lambda: eager))


def list_schedule(pipeline: Pipeline, *, backward_first: bool, eager_weight: bool) -> Iterator[int]:
    """List scheduling: a free rank runs what has arrived. Better than rounds if stages differ or the limit is low.
    Yields lower bounds of `longest`."""
    events = [(0, rank) for rank in range(pipeline.ranks)]
    clock, costs, last = pipeline.clock, pipeline.costs, pipeline.ranks - 1
    for number in count(1):
        if not events:
            return
        if number % (EVENTS * pipeline.ranks) == 0:
            yield pipeline.least_longest()
        now, rank = heappop(events)
        if now < clock[rank]:
            continue  # busy; another event comes when it is free
        op, then = _choose(pipeline, rank, now, backward_first, eager_weight)
        if op is not None:
            pipeline.run(rank, op)
            then = clock[rank]
            if op == F and rank < last:
                heappush(events, (then + costs.forward_hop[rank + 1], rank + 1))
            if op == B and rank > 0:
                heappush(events, (then + costs.backward_hop[rank - 1], rank - 1))
        if then < NEVER:
            heappush(events, (then, rank))


def _choose(
    pipeline: Pipeline, rank: int, now: int, backward_first: bool, eager_weight: bool
) -> tuple[int | None, int]:
    """What a free rank runs now, or until when it waits. `backward_first`: B goes before F. `eager_weight`: W may delay
    F and B."""
    weights, pending = pipeline.weights_before_forward(rank), pipeline.pending[rank]
    forward = pipeline.next_activation(rank) if weights <= pending else NEVER
    backward = pipeline.next_gradient(rank)
    if backward <= now and (backward_first or forward > now or weights > 0):
        return B, now
    if forward <= now:
        return W if weights > 0 else F, now
    if pending and now + pipeline.costs.weight[rank] <= min(forward, backward):
        return W, now
    if pending and eager_weight:
        pipeline.eager_mattered = True
        return W, now
    return None, min(forward, backward)


def _replay(pipeline: Pipeline, streams: list[deque[int]]) -> Candidate[Pipeline]:
    """Runs given streams: each rank in turn as far as its inputs have been produced."""
    arrival = {F: pipeline.next_activation, B: pipeline.next_gradient, W: lambda rank: 0}
    for number in count(1):
        if not any(streams):
            break
        if number % ROUNDS == 0:
            yield pipeline.least_longest()
        for rank, ops in enumerate(streams):
            while ops and arrival[ops[0]](rank) < NEVER:
                pipeline.run(rank, ops.popleft())
    return pipeline
