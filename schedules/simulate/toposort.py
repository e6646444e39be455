"""Events in the order in which they must happen, and when they do, where every event waits for earlier ones.

Wide graphs are walked level by level with arrays, narrow ones event by event: each is several times as quick where the
other is slow, and both give the same.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np

from pentad.schedules.ir.columns import Array

WIDE = 20  # events a level from which on arrays are quicker


class Graph(NamedTuple):
    """The `k`-th edge: `earlier[k]` has ended, and `extra[k]` seconds have passed, before `later[k]` starts.

    There are so many `events`; `width` is about how many can happen at once.
    """

    events: int
    earlier: Array
    later: Array
    width: int
    extra: Array | None = None


class Levels(NamedTuple):
    """`order` has every event behind those it waits for, fewer than all where some wait for each other; those from
    `bounds[k]` to `bounds[k + 1]` wait for none of each other (no bounds: walked one by one)."""

    order: Array
    bounds: list[int]


def levels(graph: Graph) -> Levels:
    by_earlier = np.argsort(graph.earlier, kind="stable")
    after = graph.later[by_earlier]
    first = np.concatenate(([0], np.bincount(graph.earlier, minlength=graph.events).cumsum()))
    left = np.bincount(graph.later, minlength=graph.events)
    if graph.width < WIDE:
        return Levels(_one_by_one(first.tolist(), after.tolist(), left.tolist()), [])
    found, bounds = [], [0]
    seen, numbers = np.zeros(graph.events, int), np.arange(len(after) + 1)
    degree, end = np.diff(first), first[1:]
    ready = np.flatnonzero(left == 0)
    while len(ready):
        found.append(ready)
        bounds.append(bounds[-1] + len(ready))
        counts = degree.take(ready)
        ends = counts.cumsum()
        later = after.take(numbers[: ends[-1]] + (end.take(ready) - ends).repeat(counts))
        np.subtract.at(left, later, 1)
        free = later[left.take(later) == 0]
        mine = numbers[: len(free)]
        seen[free] = mine
        ready = free[seen.take(free) == mine]  # each but once
    return Levels(np.concatenate(found) if found else np.zeros(0, int), bounds)


def _one_by_one(first: list[int], after: list[int], left: list[int]) -> Array:
    order = [event for event, count in enumerate(left) if not count]
    for event in order:
        for later in after[first[event] : first[event + 1]]:
            left[later] -= 1
            if not left[later]:
                order.append(later)
    return np.array(order, int)


def times(graph: Graph, walked: Levels, first: Array, second: Array) -> tuple[Array, Array]:
    """Start and end of every event that takes `first` and then `second` seconds and starts as soon as it may."""
    by_later = np.argsort(graph.later, kind="stable")
    edges = np.concatenate(([0], np.bincount(graph.later, minlength=graph.events).cumsum()))
    if not walked.bounds:
        return _times_one_by_one(graph, walked, edges, by_later, (first, second))
    # Events are numbered anew in their order, so that a level and its edges are slices.
    order, count = walked.order, len(walked.order)
    number = np.full(graph.events, count)
    number[order] = np.arange(count)
    degree = np.diff(edges)[order]
    last = np.concatenate(([0], degree.cumsum()))
    at = by_later[np.arange(last[-1]) + np.repeat(edges[order] - last[:-1], degree)]
    earlier, extra = number[graph.earlier[at]], None if graph.extra is None else graph.extra[at]
    starts, ends, one, two = np.zeros(count), np.zeros(count), first[order], second[order]
    some = int(np.count_nonzero(degree == 0))  # the first level, which waits for nothing
    ends[:some] = one[:some] + two[:some]
    bounds = walked.bounds[1:]
    for (a, b), (x, y) in zip(pairwise(bounds), pairwise(last[bounds].tolist()), strict=True):
        begun = ends[earlier[x:y]]
        if extra is not None:
            begun += extra[x:y]
        start = np.maximum.reduceat(begun, last[a:b] - x, out=starts[a:b])
        np.add(start + one[a:b], two[a:b], out=ends[a:b])
    found = np.zeros(graph.events), np.zeros(graph.events)
    found[0][order], found[1][order] = starts, ends
    return found


def _times_one_by_one(
    graph: Graph, walked: Levels, edges: Array, by_later: Array, seconds: tuple[Array, Array]
) -> tuple[Array, Array]:
    first, earlier = edges.tolist(), graph.earlier[by_later].tolist()
    extra = graph.extra[by_later].tolist() if graph.extra is not None else [0.0] * len(earlier)
    one, two = (part.tolist() for part in seconds)
    starts, ends = [0.0] * graph.events, [0.0] * graph.events
    for event in walked.order.tolist():
        a, b = first[event], first[event + 1]
        start = 0.0
        for k in range(a, b):
            begun = ends[earlier[k]] + extra[k]
            if begun > start:
                start = begun
        starts[event] = start
        ends[event] = start + one[event] + two[event]
    return np.array(starts), np.array(ends)
