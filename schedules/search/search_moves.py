"""Tabu search over orders: what starts or ends a critical block of one rank changes places with what is inside it.

Only such moves can shorten a step (Nowicki and Smutnicki 1996, for job shops); each is judged by the heads and tails of
what it moves (Taillard 1994), and the best that is not forbidden is made, for better or worse. A move takes a kind of
operation from one place of a rank's order to another; microbatches are numbered anew, so that they keep their order.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from pentad.schedules.search.search_problem import UNITS, Orders, Problem, length, tails, timed

TENURE = 8  # moves for which one may not be taken back, and up to as many more
STALE = 200  # timings without gain before the search starts again from the best
KICKS = 6  # random exchanges then


class Found(NamedTuple):
    """Orders, their greatest end and handicap in ticks, and how many orders were timed to find them."""

    orders: Orders
    ticks: int
    spent: int


class Move(NamedTuple):
    """The order of `rank` from place `low` on becomes `segment`; `code` passes `node` to the `right` or left."""

    rank: int
    low: int
    segment: list[int]
    code: int
    node: int
    right: bool


def improved(problem: Problem, orders: Orders, budget: int, least: int = 0) -> Found:
    """The best orders met in so many timings, starting from valid ones; stops at `least` ticks, as nothing is less.

    Where no move is left, or none has helped for long, it starts again from the best after a few random exchanges.
    """
    rng = random.Random(budget)
    state = _State(problem, orders)
    best, spent, since = Found(orders, state.now, 1), 1, 1
    forbidden: dict[tuple[int, int, bool], int] = {}
    while spent < budget and best.ticks > least:
        allowed = [] if spent - since > STALE else _judged(state, rng, best.ticks, forbidden, spent)
        made, tried = _first(state, allowed)
        spent += tried
        if made is None:
            state, since = _kicked(problem, best.orders, rng), spent
            forbidden.clear()
            continue
        state, move = made
        until = spent + TENURE + rng.randrange(TENURE)
        for key in _back(problem, move):
            forbidden[key] = until
        if state.now < best.ticks:
            best, since = Found(state.orders, state.now, spent), spent
    return best._replace(spent=spent)


def _judged(
    state: _State, rng: random.Random, best: int, forbidden: dict[tuple[int, int, bool], int], spent: int
) -> list[Move]:
    """The three moves that promise most, of those that are not forbidden or promise more than the best."""
    judged = [(state.estimate(move), rng.random(), move) for move in state.moves(rng)]
    allowed = [
        (ticks, luck, move)
        for ticks, luck, move in judged
        if ticks < best or forbidden.get((move.code, move.node, move.right), 0) <= spent
    ]
    return [move for _, _, move in sorted(allowed or judged)[:3]]


def _first(state: _State, moves: list[Move]) -> tuple[tuple[_State, Move] | None, int]:
    """The first that leaves no ranks waiting for one another, and how many were timed to know."""
    for tried, move in enumerate(moves, 1):
        after = state.after(move)
        if after.valid:
            return (after, move), tried
    return None, len(moves) + KICKS


def _kicked(problem: Problem, orders: Orders, rng: random.Random) -> _State:
    """A few neighbours of different kinds exchanged, wherever that is legal."""
    state = _State(problem, orders)
    for _ in range(KICKS):
        rank = rng.randrange(problem.ranks)
        place = rng.randrange(len(state.orders[rank]) - 1)
        for move in state.exchange(rank, place):
            after = state.after(move)
            state = after if after.valid else state
    return state


def _back(problem: Problem, move: Move) -> tuple[tuple[int, int, bool], tuple[int, int, bool]]:
    """What would undo a move: its code passing the same operation again, or that one's code passing it."""
    moved = move.segment[-1 if move.right else 0]
    return (move.code, move.node, not move.right), (move.node // problem.microbatches, moved, move.right)


class _State:
    """One order with its times, and its critical chain."""

    def __init__(self, problem: Problem, orders: Orders) -> None:
        self.problem, self.orders = problem, orders
        self.size = problem.stages * problem.microbatches
        self.held: dict[int, list[int]] = {}
        timing = timed(problem, orders)
        self.valid = timing is not None
        if timing:
            self.starts, self.ends, self.sequence = timing
            self.now = length(problem, orders, self.ends)

    @cached_property
    def tails(self) -> list[int]:
        return tails(self.problem, self.orders, self.sequence)

    def after(self, move: Move) -> _State:
        order, end = self.orders[move.rank], move.low + len(move.segment)
        changed = [*self.orders]
        changed[move.rank] = [*order[: move.low], *move.segment, *order[end:]]
        return _State(self.problem, changed)

    def exchange(self, rank: int, place: int) -> Iterator[Move]:
        """Two neighbours, if they may change places."""
        first, then = (each // self.problem.microbatches for each in self.orders[rank][place : place + 2])
        if first != then:
            yield from self._legal(rank, place, place + 1, first, right=True)

    def moves(self, rng: random.Random) -> Iterator[Move]:
        """Into and out of the two ends of each block of a critical chain that lies between two others."""
        for rank, low, high, first, last in self._blocks(rng):
            order = self.orders[rank]
            codes = [each // self.problem.microbatches for each in order[low : high + 1]]
            if not last:
                nearest = {code: place for place, code in enumerate(codes[:-1])}
                for code, place in nearest.items():
                    if code != codes[-1]:
                        yield from self._legal(rank, low + place, high, code, right=True)
            if not first:
                nearest = {code: place for place, code in reversed([*enumerate(codes)][1:])}
                for code, place in nearest.items():
                    if code != codes[0]:
                        yield from self._legal(rank, low, low + place, code, right=False)

    def estimate(self, move: Move) -> int:
        """The longest chain through what is moved, were nothing else to change."""
        problem, ends, after = self.problem, self.ends, self.tails
        needs, hops, seconds = problem.needs, problem.hops, problem.seconds
        order, low = self.orders[move.rank], move.low
        clock = ends[order[low - 1]] if low else 0
        begun = []
        new: dict[int, int] = {}
        for each in move.segment:
            need = needs[each]
            if need >= 0:
                clock = max(clock, new.get(need, ends[need]) + hops[each])
            begun.append(clock)
            clock += seconds[each]
            new[each] = clock
        high = low + len(move.segment)
        left = after[order[high]] + seconds[order[high]] if high < len(order) else problem.handicap[move.rank]
        longest = 0
        for each, start in zip(reversed(move.segment), reversed(begun), strict=True):
            reader = self._reader(each)
            if reader >= 0:
                left = max(left, after[reader] + seconds[reader] + hops[reader])
            left += seconds[each]
            longest = max(longest, start + left)
        return longest

    def _reader(self, each: int) -> int:
        """The operation on another stage that reads a result; -1: none."""
        kind, rest = divmod(each, self.size)
        many = self.problem.microbatches
        if kind == 0:
            return each + many if rest < self.size - many else -1
        return each - many if kind == 1 and rest >= many else -1

    def _blocks(self, rng: random.Random) -> Iterator[tuple[int, int, int, bool, bool]]:
        """(rank, first place, last place, begins the chain, ends it) of a critical chain, from its end."""
        problem, starts, ends = self.problem, self.starts, self.ends
        finals = [
            (rank, len(order) - 1)
            for rank, order in enumerate(self.orders)
            if ends[order[-1]] + problem.handicap[rank] == self.now
        ]
        rank, high = rng.choice(finals)
        place, last = high, True
        while True:
            order = self.orders[rank]
            each = order[place]
            start, need = starts[each], problem.needs[each]
            by_order = place > 0 and ends[order[place - 1]] == start
            by_data = need >= 0 and ends[need] + problem.hops[each] == start
            source = problem.home[need // problem.microbatches % problem.stages] if by_data else rank
            if by_order and (not by_data or source == rank or rng.random() < 0.5):
                place -= 1
                continue
            if high > place:
                yield rank, place, high, source == rank, last
            if source == rank:
                return
            rank, high, last = source, self.orders[source].index(need), False
            place = high

    def _legal(self, rank: int, low: int, high: int, code: int, *, right: bool) -> Iterator[Move]:
        """The move, unless a microbatch would come too soon on its own rank or there is no room."""
        size, old = self.size, self.orders[rank][low : high + 1]
        segment = self._turned(old, code, right=right)
        held = self._held(rank)[low - 1] if low else 0
        seen: set[int] = set()
        whole = set(segment)
        for each in segment:
            kind = each // size
            held += UNITS[kind]
            if held > self.problem.room[rank] or (kind and each - size in whole and each - size not in seen):
                return
            seen.add(each)
        yield Move(rank, low, segment, code, old[-1] if right else old[0], right)

    def _turned(self, old: list[int], code: int, *, right: bool) -> list[int]:
        """The first operation, which is of `code`, moved behind the last one, or the last one before the first."""
        many = self.problem.microbatches
        body = old[1:] if right else old[:-1]
        marks = [each if each // many != code else -1 for each in body]
        numbers = (each for each in old if each // many == code)
        return [each if each >= 0 else next(numbers) for each in ([*marks, -1] if right else [-1, *marks])]

    def _held(self, rank: int) -> list[int]:
        if rank not in self.held:
            self.held[rank] = list(accumulate(UNITS[each // self.size] for each in self.orders[rank]))
        return self.held[rank]
