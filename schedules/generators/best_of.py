"""Picks the best of several candidates that are built step by step, without completing those that cannot win."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from heapq import heapify, heappop, heapreplace
from typing import TypeVar

T = TypeVar("T")
Candidate = Generator[float, None, T]  # returns a result; yields lower bounds of the first number of its key


def best_of(candidates: Iterable[Candidate[T]], key: Callable[[T], tuple[float, ...]], rounding: float = 0.0) -> T:
    """The result with the least key, the first of several. The candidate with the least bound advances; bounds may be
    too high by `rounding`."""
    heap = [(0.0, number, candidate) for number, candidate in enumerate(candidates)]
    heapify(heap)
    best: tuple[tuple[float, ...], int, T] | None = None
    while heap and (best is None or heap[0][0] <= best[0][0] + rounding):
        _, number, candidate = heap[0]
        try:
            heapreplace(heap, (next(candidate), number, candidate))
        except StopIteration as end:
            heappop(heap)
            found = key(end.value), number, end.value
            if best is None or found[:2] < best[:2]:
                best = found
    assert best is not None
    return best[2]
