"""Topological order and earliest times of an event graph.

There are two implementations with equal results: wide graphs are processed level by level with arrays, narrow ones
event by event in plain Python. Each is several times faster than the other on its kind.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np

from pentad.schedules.ir.columns import Array

WIDE = 20  # events per level from which arrays are faster


class Graph(NamedTuple):
    """Edge k: event `target[k]` starts no earlier than `delay[k]` seconds (default: 0) after the end of `source[k]`.

    `events` is the number of events, `width` roughly how many can run at once.
    """

    events: int
    source: Array
    target: Array
    width: int
    delay: Array | None = None


class Levels(NamedTuple):
    """`order` lists every event after its predecessors; events on a cycle, or after one, are missing.

    Events from `bounds[k]` to `bounds[k + 1]` are independent. A narrow graph has no bounds.
    """

    order: Array
    bounds: list[int]


def grouped(group: Array, groups: int) -> tuple[Array, Array]:
    """Indices of `group` sorted by their value, equal ones in order, and `bounds`: those of value v are at bounds[v] to
    bounds[v + 1]."""
    bounds = np.concatenate(([0], np.bincount(group, minlength=groups).cumsum()))
    return np.argsort(group, kind="stable"), bounds


def topological_levels(graph: Graph) -> Levels:
    if graph.width < WIDE and (graph.source < graph.target).all():  # as on one rank
        return Levels(np.arange(graph.events), [])
    by_source, first = grouped(graph.source, graph.events)
    successors = graph.target[by_source]
    missing = np.bincount(graph.target, minlength=graph.events)  # predecessors that are not in the order yet
    if graph.width < WIDE:
        return Levels(_one_by_one(first.tolist(), successors.tolist(), missing.tolist()), [])
    found, bounds = [], [0]
    seen, numbers = np.zeros(graph.events, int), np.arange(len(successors) + 1)
    degree, end = np.diff(first), first[1:]
    level = np.flatnonzero(missing == 0)
    while len(level):
        found.append(level)
        bounds.append(bounds[-1] + len(level))
        counts = degree.take(level)
        ends = counts.cumsum()
        targets = successors.take(numbers[: ends[-1]] + (end.take(level) - ends).repeat(counts))
        np.subtract.at(missing, targets, 1)
        free = targets[missing.take(targets) == 0]
        mine = numbers[: len(free)]
        seen[free] = mine
        level = free[seen.take(free) == mine]  # without duplicates
    return Levels(np.concatenate(found) if found else np.zeros(0, int), bounds)


def _one_by_one(first: list[int], successors: list[int], missing: list[int]) -> Array:
    order = [event for event, count in enumerate(missing) if not count]
    for event in order:
        for target in successors[first[event] : first[event + 1]]:
            missing[target] -= 1
            if not missing[target]:
                order.append(target)
    return np.array(order, int)


def earliest_times(graph: Graph, levels: Levels, first: Array, second: Array) -> tuple[Array, Array]:
    """Start and end of every event; event k lasts `first[k]` and then `second[k]` seconds. In a wide graph without
    delays both may be [events, simulations], for several simulations at once."""
    by_target, edges = grouped(graph.target, graph.events)
    if not levels.bounds:
        return _times_one_by_one(graph, levels.order, first, second)
    # Renumber events by their order: then a level is a slice, and so are its edges.
    order, count = levels.order, len(levels.order)
    number = np.full(graph.events, count)
    number[order] = np.arange(count)
    degree = np.diff(edges)[order]
    last = np.concatenate(([0], degree.cumsum()))
    at = by_target[np.arange(last[-1]) + np.repeat(edges[order] - last[:-1], degree)]
    source, delay = number[graph.source[at]], None if graph.delay is None else graph.delay[at]
    one, two = first[order], second[order]
    starts, ends = np.zeros(one.shape), np.zeros(one.shape)
    roots = int(np.count_nonzero(degree == 0))  # the first level, which has no predecessors
    ends[:roots] = one[:roots] + two[:roots]
    bounds = levels.bounds[1:]
    for (a, b), (x, y) in zip(pairwise(bounds), pairwise(last[bounds].tolist()), strict=True):
        ready = ends[source[x:y]]
        if delay is not None:
            ready += delay[x:y]
        start = np.maximum.reduceat(ready, last[a:b] - x, axis=0, out=starts[a:b])
        np.add(start + one[a:b], two[a:b], out=ends[a:b])
    found = np.zeros(first.shape), np.zeros(first.shape)
    found[0][order], found[1][order] = starts, ends
    return found


def _times_one_by_one(graph: Graph, order: Array, first: Array, second: Array) -> tuple[Array, Array]:
    by_target, bounds = grouped(graph.target, graph.events)
    # Events are renumbered by their order, from 1. Nearly all have at most two predecessors, and no delays; a missing
    # one is number 0, which ends at 0. Other edges are handled separately.
    number = np.zeros(graph.events, int)
    number[order] = np.arange(1, len(order) + 1)
    sources, target = np.append(number[graph.source[by_target]], 0), graph.target[by_target]
    edges = np.stack([np.where(bounds[order] + k < bounds[order + 1], bounds[order] + k, -1) for k in (0, 1)])
    delay = np.zeros(len(by_target)) if graph.delay is None else graph.delay[by_target]
    apart = np.flatnonzero((np.arange(len(by_target)) - bounds[target] > 1) | (delay > 0))
    more: list[list[tuple[int, float]] | None] = [None] * (len(order) + 1)
    pairs = zip(sources[apart].tolist(), delay[apart].tolist(), strict=True)
    for event, edge in zip(number[target[apart]].tolist(), pairs, strict=True):
        if (known := more[event]) is None:
            more[event] = [edge]
        else:
            known.append(edge)
    starts, ends = list[float](), [0.0]
    rows = zip(first[order].tolist(), second[order].tolist(), *sources[edges].tolist(), more[1:], strict=True)
    for before, after, one, other, others in rows:
        start, ready = ends[one], ends[other]
        if ready > start:
            start = ready
        if others is not None:
            for source, seconds in others:
                ready = ends[source] + seconds
                if ready > start:
                    start = ready
        starts.append(start)
        ends.append(start + before + after)
    found = np.zeros((2, graph.events))
    found[0, order], found[1, order] = starts, ends[1:]
    return found[0], found[1]
