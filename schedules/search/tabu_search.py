"""Tabu search: moves operations into and out of the ends of critical blocks.

Only such moves can shorten a step (Nowicki and Smutnicki 1996, for job shops). A critical block is a run of operations
of one rank, without gaps, on a critical path. Moves are estimated from heads and tails (Taillard 1994); the best that
is not forbidden is made, even if it lengthens the step. A move takes one operation of a code past others, after which
the microbatches of that code are numbered again in order.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from pentad.schedules.search.problem import MEMORY, Orders, Problem, step_ticks, tails, times_of

TENURE = 8  # a move may not be undone for this many timings, plus up to as many more at random
STALE = 200  # timings without improvement until the search restarts from the best orders
KICKS = 6  # random exchanges at a restart
Undo = tuple[int, int, bool]  # code, operation passed, to the right


class Move(NamedTuple):
    """`segment` replaces the operations of `rank` from `low` on; one of `code` passes `passed` to the `right` or
    left."""

    rank: int
    low: int
    segment: list[int]
    code: int
    passed: int
    right: bool


def improve(problem: Problem, orders: Orders, budget: int, bound: int = 0) -> State:
    """The best orders found within `budget` timings, from valid ones; stops at `bound` ticks, which none can beat.

    If no move is left, or none has helped for long, it restarts from the best orders after random exchanges.
    """
    rng = random.Random(budget)
    best = state = State(problem, orders)
    timings = improved_at = 1
    forbidden: dict[Undo, int] = {}
    while timings < budget and best.ticks > bound:
        moves = [] if timings - improved_at > STALE else _candidates(state, rng, best.ticks, forbidden, timings)
        made, tried = _first_valid(state, moves)
        timings += tried
        if made is None:
            state, improved_at = _kicked(best, rng), timings
            forbidden.clear()
            continue
        state, move = made
        until = timings + TENURE + rng.randrange(TENURE)
        for undo in _undos(problem, move):
            forbidden[undo] = until
        if state.ticks < best.ticks:
            best, improved_at = state, timings
    return best


def _candidates(state: State, rng: random.Random, best: int, forbidden: dict[Undo, int], timings: int) -> list[Move]:
    """The three most promising moves, of those that are not forbidden or promise a new best."""
    rated = [(state.estimate(move), rng.random(), move) for move in state.moves(rng)]
    allowed = [
        (ticks, luck, move)
        for ticks, luck, move in rated
        if ticks < best or forbidden.get((move.code, move.passed, move.right), 0) <= timings
    ]
    return [move for _, _, move in sorted(allowed or rated)[:3]]


def _first_valid(state: State, moves: list[Move]) -> tuple[tuple[State, Move] | None, int]:
    """The first move after which ranks do not wait for one another forever, and how many were timed."""
    for tried, move in enumerate(moves, 1):
        after = state.after(move)
        if after.valid:
            return (after, move), tried
    return None, len(moves) + KICKS


def _kicked(state: State, rng: random.Random) -> State:
    """Exchanges a few random neighbours, where that is legal."""
    for _ in range(KICKS):
        rank = rng.randrange(len(state.orders))
        index = rng.randrange(len(state.orders[rank]) - 1)
        for move in state.legal(rank, index, index + 1, right=True):
            after = state.after(move)
            state = after if after.valid else state
    return state


def _undos(problem: Problem, move: Move) -> tuple[Undo, Undo]:
    """Moves that would undo this one: its code passes the same operation again, or that one's code passes it."""
    moved = move.segment[-1 if move.right else 0]
    return (move.code, move.passed, not move.right), (move.passed // problem.microbatches, moved, move.right)


class State:
    """Orders with their times and critical blocks."""

    def __init__(self, problem: Problem, orders: Orders) -> None:
        self.problem, self.orders = problem, orders
        self._memory: dict[int, list[int]] = {}
        timing = times_of(problem, orders)
        self.valid = timing is not None
        if timing:
            self.starts, self.ends, self.sequence = timing
            self.ticks = step_ticks(problem, orders, self.ends)

    @cached_property
    def tails(self) -> list[int]:
        return tails(self.problem, self.orders, self.sequence)

    def after(self, move: Move) -> State:
        order, end = self.orders[move.rank], move.low + len(move.segment)
        changed = [*self.orders]
        changed[move.rank] = [*order[: move.low], *move.segment, *order[end:]]
        return State(self.problem, changed)

    def moves(self, rng: random.Random) -> Iterator[Move]:
        """Moves into and out of both ends of each critical block, except the start of the first and the end of the
        last."""
        for rank, low, high, first, last in self._critical_blocks(rng):
            codes = [each // self.problem.microbatches for each in self.orders[rank][low : high + 1]]
            if not last:
                nearest = {code: index for index, code in enumerate(codes[:-1])}
                for code, index in nearest.items():
                    if code != codes[-1]:
                        yield from self.legal(rank, low + index, high, right=True)
            if not first:
                nearest = {code: index for index, code in reversed([*enumerate(codes)][1:])}
                for code, index in nearest.items():
                    if code != codes[0]:
                        yield from self.legal(rank, low, low + index, right=False)

    def estimate(self, move: Move) -> int:
        """The longest path through the moved operations, if nothing else changed."""
        problem, ends, after = self.problem, self.ends, self.tails
        inputs, delays, ticks = problem.inputs, problem.delays, problem.ticks
        order, low = self.orders[move.rank], move.low
        clock = ends[order[low - 1]] if low else 0
        starts = []
        new_ends: dict[int, int] = {}
        for each in move.segment:
            needed = inputs[each]
            if needed >= 0:
                clock = max(clock, new_ends.get(needed, ends[needed]) + delays[each])
            starts.append(clock)
            clock += ticks[each]
            new_ends[each] = clock
        high = low + len(move.segment)
        tail = after[order[high]] + ticks[order[high]] if high < len(order) else problem.handicaps[move.rank]
        longest = 0
        for each, start in zip(reversed(move.segment), reversed(starts), strict=True):
            reader = problem.readers[each]
            if reader >= 0:
                tail = max(tail, after[reader] + ticks[reader] + delays[reader])
            tail += ticks[each]
            longest = max(longest, start + tail)
        return longest

    def _critical_blocks(self, rng: random.Random) -> Iterator[tuple[int, int, int, bool, bool]]:
        """(rank, first index, last index, starts the path, ends the path) along a critical path, from its end."""
        problem, starts, ends = self.problem, self.starts, self.ends
        finals = [
            (rank, len(order) - 1)
            for rank, order in enumerate(self.orders)
            if ends[order[-1]] + problem.handicaps[rank] == self.ticks
        ]
        rank, high = rng.choice(finals)
        index, last = high, True
        while True:
            order = self.orders[rank]
            each = order[index]
            start, needed = starts[each], problem.inputs[each]
            after_previous = index > 0 and ends[order[index - 1]] == start
            after_input = needed >= 0 and ends[needed] + problem.delays[each] == start
            source = problem.rank_running(needed) if after_input else rank
            if after_previous and (not after_input or source == rank or rng.random() < 0.5):
                index -= 1
                continue
            if high > index:
                yield rank, index, high, source == rank, last
            if source == rank:
                return
            rank, high, last = source, self.orders[source].index(needed), False
            index = high

    def legal(self, rank: int, low: int, high: int, *, right: bool) -> Iterator[Move]:
        """The move of the operation at `low` to `high` or, if not `right`, of that at `high` to `low`, unless a B or W
        would precede what it needs on its rank, or the capacity is exceeded."""
        size, old = self.problem.size, self.orders[rank][low : high + 1]
        many = self.problem.microbatches
        code = old[0 if right else -1] // many
        moved = [*old[1:], old[0]] if right else [old[-1], *old[:-1]]
        numbers = (each for each in old if each // many == code)
        segment = [next(numbers) if each // many == code else each for each in moved]
        saved = self._saved(rank)[low - 1] if low else 0
        seen: set[int] = set()
        inside = set(segment)
        for each in segment:
            kind = each // size
            saved += MEMORY[kind]
            if saved > self.problem.capacity or (kind and each - size in inside and each - size not in seen):
                return
            seen.add(each)
        yield Move(rank, low, segment, code, old[-1] if right else old[0], right)

    def _saved(self, rank: int) -> list[int]:
        """Half activations saved after each operation of a rank."""
        if rank not in self._memory:
            self._memory[rank] = list(accumulate(MEMORY[each // self.problem.size] for each in self.orders[rank]))
        return self._memory[rank]
