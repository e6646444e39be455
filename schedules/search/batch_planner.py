"""Which microbatch each sequence of a step goes to: a pure function of the sequences' costs.

Longest-processing-time first (Graham, SIAM J. Appl. Math. 17, 1969) balances the work; every plan comes with a lower
bound for all plans.
"""

from __future__ import annotations

from heapq import heappop, heappush
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Microbatch = tuple[int, ...]  # the numbers of its sequences


class Balance(NamedTuple):
    """Seconds of work of each replica or rank [n], when the last one ends, and a lower bound of that."""

    work: NDArray[np.float64]
    end: float
    bound: float

    @property
    def gap(self) -> float:
        """By what share at most the end is later than that of the best plan."""
        return self.end / self.bound - 1 if self.bound else 0.0


class StaticPlan(NamedTuple):
    """The microbatches of each replica of a static mesh, equally many."""

    replicas: tuple[tuple[Microbatch, ...], ...]
    balance: Balance

    @property
    def order(self) -> NDArray[np.int64]:
        """[sequences] those of the first replica's first microbatch, then of its second, and so on."""
        return np.array([*chain(*chain(*self.replicas))], np.int64)


def balanced(seconds: NDArray[np.float64], micro_batch_size: int, replicas: int) -> StaticPlan:
    """A plan for sequences that take `seconds` [sequences], just as many as fill the microbatches of all replicas.

    Longest-processing-time first makes microbatches of nearly equal cost, and deals these to replicas so that their
    work is nearly equal. A replica's microbatches are in descending order of cost, so that neighbours in the pipeline
    are similar.
    """
    count = len(seconds) // micro_batch_size
    filled = sorted(_dealt(seconds, count, micro_batch_size))
    work = np.array([sum(float(seconds[number]) for number in part) for part in filled])
    dealt = _dealt(work, replicas, count // replicas)
    parts = tuple(tuple(tuple(sorted(filled[number])) for number in each) for each in dealt)
    of_replicas = np.array([sum(float(work[number]) for number in each) for each in dealt])
    bound = max(float(seconds.sum()) / replicas, float(seconds.max(initial=0.0)))
    return StaticPlan(parts, Balance(of_replicas, float(of_replicas.max()), bound))


def end_of(seconds: NDArray[np.float64], ep: int) -> float:
    """When the last replica ends, from `seconds` [replicas, microbatches]: `ep` consecutive replicas, which exchange
    tokens of experts in every layer, begin and end a microbatch together."""
    return float(seconds.reshape(-1, ep, seconds.shape[1]).max(1).sum(1).max())


def _dealt(seconds: NDArray[np.float64], parts: int, size: int) -> list[list[int]]:
    """Deals `size` items to each part: the costliest item first, each to the part with the least work that has room."""
    found: list[list[int]] = [[] for _ in range(parts)]
    loads = [(0.0, part) for part in range(parts)]
    for item in np.argsort(-seconds, kind="stable").tolist():
        load, part = heappop(loads)
        found[part].append(item)
        if len(found[part]) < size:
            heappush(loads, (load + float(seconds[item]), part))
    return found
