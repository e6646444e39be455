"""Consecutive layers of unlike costs, cut into stages."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from pentad.schedules.spec.plan import split_layers


def cut_layers(costs: Sequence[float], placement: Sequence[Sequence[int]]) -> tuple[tuple[int, int], ...]:
    """(first, end) of each stage's layers: the dearest stage as cheap as can be, then the busiest rank as idle as
    moving single borders makes it.

    `costs` are the layers', `placement[rank]` the stages of a rank. Raises PentadError for fewer layers than stages.
    """
    borders = _even(costs, len(split_layers(len(costs), placement)))

    def burdens(borders: list[int]) -> list[float]:
        """Of the ranks, the busiest one first."""
        each = [sum(costs[first:end]) for first, end in pairwise(borders)]
        return sorted((sum(each[stage] for stage in held) for held in placement), reverse=True)

    best, improved = burdens(borders), True
    while improved:
        improved = False
        for at in range(1, len(borders) - 1):
            for move in (-1, 1):
                moved = [*borders[:at], borders[at] + move, *borders[at + 1 :]]
                if moved[at - 1] < moved[at] < moved[at + 1] and (now := burdens(moved)) < best:
                    borders, best, improved = moved, now, True
    return tuple(pairwise(borders))


def _even(costs: Sequence[float], stages: int) -> list[int]:
    """Borders of stages of which the dearest is as cheap as can be, by what is best for the first layers."""
    sums = list(accumulate(costs, initial=0.0))
    best: dict[int, tuple[float, list[int]]] = {end: (sums[end], [0, end]) for end in range(1, len(sums))}
    for count in range(2, stages + 1):
        ends = range(count, len(sums))
        best = {
            end: min((max(best[at][0], sums[end] - sums[at]), [*best[at][1], end]) for at in range(count - 1, end))
            for end in ends
        }
    return best[len(costs)][1]
