"""Orders of one placement: list schedules under many rules, the best of them improved by moves.

What is tried depends on sizes and costs alone, never on the clock, so that the same question has the same answer.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import inf
from typing import NamedTuple

from pentad.schedules.ir.instruction import Instruction, Op, Unit
from pentad.schedules.search.search_list import Rule, by_age, caps_of, listed
from pentad.schedules.search.search_moves import improved
from pentad.schedules.search.search_problem import Orders, Problem, length, orders_of, peak, streams_of, timed

STRETCHES = (0.0, 1.0, 1.5, 0.5)
PATIENCES = (0.0, 0.5, 1.0)
SHARES = (0.0, 0.5, 1.0)
MORE = (0.5, inf, 1.0, 0.0, 1.5, 2.0)  # microbatches over a stage's share of the room
ROOMS = (1.0, 1.5, 2.0)  # of what 1F1B keeps, where the limit is higher
KEPT = 5  # orders of a placement that are worth moves
MOST_MOVES = 3000


class Order(NamedTuple):
    """Orders with their greatest end and handicap in ticks and their peak in half activations of a chunk."""

    ticks: int
    peak: int
    origin: str
    orders: Orders


@dataclass
class Search:
    """One placement's best orders so far. `least` are ticks that no order can beat."""

    problem: Problem
    least: int
    best: list[Order]

    @property
    def ticks(self) -> float:
        return self.best[0].ticks if self.best else inf

    @property
    def span(self) -> float:
        return self.problem.span(self.best[0].ticks)

    @property
    def met(self) -> bool:
        return self.ticks <= self.least

    def add(self, origin: str, orders: Orders) -> None:
        """Keeps what is among the best and within the room."""
        timing = timed(self.problem, orders)
        peaks = [peak(self.problem, order) for order in orders]
        if timing is None or any(most > room for most, room in zip(peaks, self.problem.room, strict=True)):
            return
        found = Order(length(self.problem, orders, timing.ends), max(peaks), origin, orders)
        if all(found[:2] != order[:2] for order in self.best):  # of orders as good, the first: others are much like it
            self.best = sorted([*self.best, found], key=lambda order: order[:2])[:KEPT]

    def start(self, name: str, streams: Sequence[Sequence[Unit]]) -> None:
        """From a schedule of the catalogue."""
        self.add(name, orders_of(self.problem, streams))

    def rules(self, operations: int) -> None:
        """As many list schedules as so many operations are, at least one, until one meets the bound."""
        grid = _grid(self.problem)
        for number in range(min(len(grid), 1 + operations // self.problem.size)):
            if self.met:
                return
            stretch, rule = grid[number]
            self.add("rules", listed(self.problem, by_age(self.problem, stretch, inf), rule))

    def moves(self, operations: int) -> None:
        """Moves from each of the best in turn, for so many operations timed: half of them from the best."""
        budget = min(operations // self.problem.size, MOST_MOVES)
        for order in [*self.best]:
            budget //= 2
            if self.met or budget < 2:
                return
            found = improved(self.problem, order.orders, budget, self.least)
            if found.ticks < order.ticks:
                origin = order.origin if order.origin.endswith("moves") else f"{order.origin} and moves"
                self.add(origin, found.orders)


def _grid(problem: Problem) -> list[tuple[float, Rule]]:
    """Every rule once, neighbours far apart, so that few of them already differ in everything."""
    usual = [tuple(min(most, int(2 * problem.chunks * problem.ranks * share)) for most in problem.room)
             for share in ROOMS]  # fmt: skip
    rooms = list(dict.fromkeys([problem.room, *usual] if max(usual[0]) >= 2 * problem.chunks else [problem.room]))
    if max(problem.room) > max(usual[-1]):
        rooms = usual  # more memory than that is no quicker
    grid = [
        (stretch, Rule(patience, share, room, caps_of(problem, room, more)))
        for more, room, stretch, patience, share in product(MORE, rooms, STRETCHES, PATIENCES, SHARES)
    ]
    random.Random(len(grid)).shuffle(grid)
    return grid


def fused(streams: Sequence[tuple[Unit, ...]], stages: range) -> tuple[tuple[Unit, ...], ...]:
    """Each B of those stages and the W that follows it at once as one BW."""
    return tuple(tuple(_fused(stream, stages)) for stream in streams)


def _fused(stream: tuple[Unit, ...], stages: range) -> Iterator[Unit]:
    held: Instruction | None = None
    for unit in stream:
        assert isinstance(unit, Instruction)
        if held and unit == Instruction(Op.W, held.stage, held.microbatch):
            yield Instruction(Op.BW, held.stage, held.microbatch)
            held = None
            continue
        if held:
            yield held
        held = unit if unit.op is Op.B and unit.stage in stages else None
        if not held:
            yield unit
    if held:
        yield held


def programs(search: Search) -> Iterator[tuple[str, tuple[tuple[Unit, ...], ...]]]:
    """The streams of the best orders, B and W together where nothing waits for B, or wherever they meet."""
    for order in search.best:
        streams = streams_of(search.problem, order.orders)
        yield order.origin, fused(streams, range(1))
        yield order.origin, fused(streams, range(search.problem.stages))
