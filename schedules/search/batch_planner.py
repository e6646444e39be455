"""Which microbatch, and which ranks, each document of a step goes to: pure functions of the documents' lengths.

A document of s tokens takes quadratic * s^2 + linear * s seconds on one rank. Longest-processing-time first (Graham,
SIAM J. Appl. Math. 17, 1969) balances these; every plan has a lower bound that no other plan of its kind is under.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush, heapreplace
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pentad.schedules.ir.errors import PentadError
from pentad.schedules.spec.batch import DocumentCosts

Microbatch = tuple[int, ...]  # the numbers of its documents
TARGETS = 8  # step times that `dynamic` tries


class Balance(NamedTuple):
    """Seconds of work of each replica or rank [n], when the last one ends, and the least that it could be."""

    work: NDArray[np.float64]
    end: float
    bound: float

    @property
    def max_over_mean(self) -> float:
        """How much longer the step takes than with all work divided equally; 1 is perfect."""
        mean = float(self.work.mean())
        return self.end / mean if mean else 1.0

    @property
    def gap(self) -> float:
        """The share by which the end may be later than that of the best plan."""
        return self.end / self.bound - 1 if self.bound else 0.0


class StaticPlan(NamedTuple):
    """The microbatches of each replica of a static mesh, equally many; some may be empty."""

    replicas: tuple[tuple[Microbatch, ...], ...]
    balance: Balance

    @property
    def order(self) -> NDArray[np.int64]:
        """[documents] those of the first replica's first microbatch, then of its second, and so on."""
        return np.array([*chain(*chain(*self.replicas))], np.int64)


class Task(NamedTuple):
    """A document, and the ranks of the pool that share it. A rank does its tasks in their order in the plan."""

    document: int
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class DynamicPlan:
    """The tasks of a pool in an order in which all ranks can do them: those of several ranks come first."""

    tasks: tuple[Task, ...]
    balance: Balance


def fixed(lengths: Sequence[int], capacity: int, replicas: int, costs: DocumentCosts) -> StaticPlan:
    """Documents as they come, as many to a microbatch as fit in its `capacity` tokens. Raises PentadError for one that
    does not."""
    _require_room(lengths, capacity, 1)
    found, used = list[list[int]](), capacity + 1
    for document, length in enumerate(lengths):
        if used + length > capacity:
            found.append([])
            used = 0
        found[-1].append(document)
        used += length
    each = max(1, -(-len(found) // replicas))
    found += [[] for _ in range(each * replicas - len(found))]
    dealt = [found[first : first + each] for first in range(0, len(found), each)]
    return _static_plan(dealt, costs.alone(lengths))


def packed(lengths: Sequence[int], capacity: int, replicas: int, costs: DocumentCosts) -> StaticPlan:
    """`balanced` documents. Raises PentadError for one that no microbatch holds."""
    _require_room(lengths, capacity, 1)
    return balanced(lengths, costs.alone(lengths), capacity, replicas)


def balanced(sizes: Sequence[int], seconds: NDArray[np.float64], capacity: int, replicas: int) -> StaticPlan:
    """Documents, or sequences of packed ones, of `sizes` up to `capacity` tokens that take `seconds` [sizes].

    Microbatches of at most `capacity` tokens have costs as equal as longest-processing-time first gets them, and are as
    few as it finds, dealt so that replicas have equal work; a replica's are in descending order of cost, so that those
    that follow each other in a pipeline are similar.
    """
    each = max(1, -(-sum(sizes) // (capacity * replicas)))
    while (found := _filled(sizes, capacity, each * replicas, seconds)) is None:
        each += 1
    work = [float(sum(seconds[item] for item in part)) for part in found]
    dealt: list[list[list[int]]] = [[] for _ in range(replicas)]
    loads = [(0.0, replica) for replica in range(replicas)]
    for number in sorted(range(len(found)), key=lambda number: (-work[number], found[number])):
        load, replica = heappop(loads)
        dealt[replica].append(sorted(found[number]))
        if len(dealt[replica]) < each:
            heappush(loads, (load + work[number], replica))
    return _static_plan(dealt, seconds)


def dynamic(lengths: Sequence[int], capacity: int, ranks: int, costs: DocumentCosts) -> DynamicPlan:
    """Each document on as many of the pool's `ranks` as its tokens need, at `capacity` a rank, and more where it would
    take longer than the step otherwise. Of TARGETS step times that a document may not exceed, the one with the earliest
    end. Raises PentadError for a document longer than the pool can hold."""
    _require_room(lengths, capacity, ranks)
    tokens, alone = np.asarray(lengths, np.int64), costs.alone(lengths)
    least = np.maximum(1, -(-tokens // capacity))
    fastest = np.minimum(costs.shared(lengths, least), costs.shared(lengths, np.full_like(least, ranks)))
    total = float((least * costs.shared(lengths, least)).sum())
    bound = max(total / ranks, float(fastest.max(initial=0.0)))
    received = costs.ring * tokens
    best: DynamicPlan | None = None
    for target in bound * np.linspace(1.0, 2.0, TARGETS):
        room = np.maximum(target - received, 1e-300)
        need = np.ceil(np.minimum((alone - received) / room * (1 - 1e-12), ranks)).astype(np.int64)
        found = _scheduled(lengths, np.clip(need, least, ranks), ranks, costs, bound)
        if best is None or found.balance.end < best.balance.end:
            best = found
    assert best is not None
    return best


def _scheduled(
    lengths: Sequence[int], wide: NDArray[np.int64], ranks: int, costs: DocumentCosts, bound: float
) -> DynamicPlan:
    """List scheduling: the widest documents first, then the longest, each on the ranks that are free first."""
    seconds = costs.shared(lengths, wide)
    order = np.lexsort((np.arange(len(wide)), -seconds, -wide)).tolist()
    free, work, tasks = np.zeros(ranks), np.zeros(ranks), list[Task]()
    several = [document for document in order if wide[document] > 1]
    for document in several:
        chosen = np.sort(np.argsort(free, kind="stable")[: wide[document]])
        free[chosen] = free[chosen].max() + seconds[document]
        work[chosen] += seconds[document]
        tasks.append(Task(document, tuple(chosen.tolist())))
    idle = list(zip(free.tolist(), range(ranks), strict=True))
    heapify(idle)
    for document in order[len(several) :]:
        since, rank = idle[0]
        heapreplace(idle, (since + seconds[document], rank))
        work[rank] += seconds[document]
        tasks.append(Task(document, (rank,)))
    return DynamicPlan(tuple(tasks), Balance(work, max(idle)[0], bound))


def _filled(
    lengths: Sequence[int], capacity: int, microbatches: int, seconds: NDArray[np.float64]
) -> list[list[int]] | None:
    """The costliest document first, into the microbatch with least work of those with room; None if none has room."""
    found: list[list[int]] = [[] for _ in range(microbatches)]
    room, work = np.full(microbatches, capacity), np.zeros(microbatches)
    for document in np.argsort(-seconds, kind="stable").tolist():
        chosen = int(np.where(room >= lengths[document], work, np.inf).argmin())
        if room[chosen] < lengths[document]:
            return None
        found[chosen].append(document)
        room[chosen] -= lengths[document]
        work[chosen] += seconds[document]
    return found


def _static_plan(dealt: list[list[list[int]]], seconds: NDArray[np.float64]) -> StaticPlan:
    work = np.array([sum(float(seconds[document]) for part in parts for document in part) for parts in dealt])
    bound = max(float(seconds.sum()) / len(dealt), float(seconds.max(initial=0.0)))
    replicas = tuple(tuple(tuple(part) for part in parts) for parts in dealt)
    return StaticPlan(replicas, Balance(work, float(work.max()), bound))


def _require_room(lengths: Sequence[int], capacity: int, ranks: int) -> None:
    longest = max(lengths, default=0)
    if longest > capacity * ranks:
        where = f"what {ranks} ranks hold" if ranks > 1 else "what a microbatch holds"
        raise PentadError(f"a document has {longest:,} tokens: expected at most {capacity * ranks:,}, {where}")
