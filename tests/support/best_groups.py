"""The exact oracle of data-aware groups: of all ways to put a few documents on ranks, the one that ends first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations

import numpy as np

from pentad.schedules.spec.batch import DocumentCosts
from pentad.schedules.spec.cp_layout import part_of

Group = frozenset[int]


def best_end(
    lengths: Sequence[int], pool: int, microbatches: int, capacity: int, costs: DocumentCosts, limit: float
) -> float:
    """The earliest end of all plans, or `limit` if none ends before it. Branch and bound: documents are placed one by
    one, longest first, and no plan ends before its partial placement does, or before all work divided equally."""
    longest_first = sorted(lengths, reverse=True)
    alone = costs.alone(longest_first)
    left = [*np.cumsum(alone[::-1])[::-1].tolist(), 0.0]
    shared = [
        [0.0, *costs.shared([length] * pool, np.arange(1, pool + 1)).tolist()] for length in longest_first
    ]  # [document][ranks]
    best = limit

    def place(number: int, plan: _Plan, area: float) -> None:
        nonlocal best
        if max(plan.end(), (area + left[number]) / pool) >= best * (1 - 1e-12):
            return
        if number == len(longest_first):
            best = plan.end()
            return
        for microbatch in range(1 if number == 0 and microbatches <= 2 else microbatches):  # others reverse these
            for ranks in plan.choices(microbatch):
                seconds = shared[number][len(ranks)]
                if plan.add(microbatch, ranks, longest_first[number], seconds, capacity):
                    place(number + 1, plan, area + seconds * len(ranks))
                plan.remove()

    place(0, _Plan(pool, microbatches), 0.0)
    return best


class _Plan:
    """The documents placed so far, each as (microbatch, ranks, tokens, seconds)."""

    def __init__(self, pool: int, microbatches: int) -> None:
        self.pool, self.microbatches = range(pool), range(microbatches)
        self.placed = list[tuple[int, Group, int, float]]()

    def choices(self, microbatch: int) -> Iterator[Group]:
        """A single rank, an existing group, or a new group of ranks that are in none. Unused ranks are interchangeable,
        so the first ones are taken."""
        used = {rank for _, ranks, *_ in self.placed for rank in ranks}
        unused = [rank for rank in self.pool if rank not in used]
        groups = {ranks for at, ranks, *_ in self.placed if at == microbatch and len(ranks) > 1}
        yield from groups
        grouped = {rank for ranks in groups for rank in ranks}
        for fresh in range(len(unused) + 1):
            for old in range(len(used) + 1):
                for each in combinations(sorted(used), old):
                    ranks = frozenset((*each, *unused[:fresh]))
                    if len(ranks) == 1 or (ranks and not ranks & grouped):
                        yield ranks

    def add(self, microbatch: int, ranks: Group, tokens: int, seconds: float, capacity: int) -> bool:
        """Returns False if a rank then has too many tokens."""
        self.placed.append((microbatch, ranks, tokens, seconds))
        for rank in ranks:
            own = sum(count for at, its, count, _ in self.placed if at == microbatch and its == {rank})
            wide = [
                (its, count) for at, its, count, _ in self.placed if at == microbatch and len(its) > 1 and rank in its
            ]
            if own + (part_of(sum(count for _, count in wide), len(wide[0][0])) if wide else 0) > capacity:
                return False
        return True

    def remove(self) -> None:
        self.placed.pop()

    def end(self) -> float:
        """The last end of a rank; the ranks of a group start and end a microbatch together."""
        ends = [0.0 for _ in self.pool]
        for microbatch in self.microbatches:
            group_of = {rank: frozenset({rank}) for rank in self.pool}
            seconds = [0.0 for _ in self.pool]
            for at, ranks, _, took in self.placed:
                if at == microbatch:
                    for rank in ranks:
                        seconds[rank] += took
                        group_of[rank] = ranks if len(ranks) > 1 else group_of[rank]
            ends = [
                max(ends[each] for each in group_of[rank]) + max(seconds[each] for each in group_of[rank])
                for rank in self.pool
            ]
        return max(ends)
