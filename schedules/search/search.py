"""Searches orders of one placement: list schedules under many rules, then tabu search from the best of them.

What is tried depends on sizes and costs only, never on a clock, so the same question always has the same answer.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import inf
from typing import NamedTuple

from pentad.schedules.ir.instruction import Action, Instruction, Op
from pentad.schedules.search.list_scheduling import Rule, age_priority, in_flight_limits, list_schedule
from pentad.schedules.search.problem import Orders, Problem, peak_memory, step_ticks, streams_of, times_of
from pentad.schedules.search.tabu_search import improve

STRETCHES = (0.0, 1.0, 1.5, 0.5)
PATIENCES = (0.0, 0.5, 1.0)
FILLS = (0.0, 0.5, 1.0)
EXTRA_IN_FLIGHT = (0.5, inf, 1.0, 0.0, 1.5, 2.0)
CAPACITIES = (1.0, 1.5, 2.0)  # in units of what 1F1B saves, where the limit is higher
MOST_ORDERS = 5  # of a placement, from which tabu search starts
MOST_TIMINGS = 3000  # of one placement's tabu search


class FoundOrder(NamedTuple):
    """Orders with their `step_ticks`, the peak memory of a rank in half activations of a chunk, and their origin."""

    ticks: int
    peak: int
    origin: str
    orders: Orders


@dataclass
class Search:
    """The best orders of one placement so far. `bound` is a number of ticks that no order can beat."""

    problem: Problem
    bound: int
    best: list[FoundOrder]

    @property
    def cost(self) -> float:
        """The objective of the best orders, in the unit of the costs."""
        return self.problem.to_cost(self.best[0].ticks)

    @property
    def is_optimal(self) -> bool:
        return bool(self.best) and self.best[0].ticks <= self.bound

    def add(self, origin: str, orders: Orders) -> None:
        """Keeps orders that are valid, within the capacity and among the best."""
        timing = times_of(self.problem, orders)
        peaks = [peak_memory(self.problem, order) for order in orders]
        if timing is None or max(peaks) > self.problem.capacity:
            return
        found = FoundOrder(step_ticks(self.problem, orders, timing.ends), max(peaks), origin, orders)
        if all(found[:2] != other[:2] for other in self.best):  # equally good orders are usually much alike
            self.best = sorted([*self.best, found], key=lambda other: other[:2])[:MOST_ORDERS]

    def list_schedules(self, operations: int) -> None:
        """Tries list schedules that place this many operations in total, at least one schedule, until one meets the
        bound."""
        rules = _rules(self.problem)
        for stretch, rule in rules[: 1 + operations // self.problem.operations]:
            if self.is_optimal:
                return
            priority = age_priority(self.problem, stretch)
            self.add("rules", list_schedule(self.problem, priority, rule))

    def tabu_search(self, operations: int) -> None:
        """Tabu search from each of the best orders, timing this many operations, half of them from the best one."""
        budget = min(operations // self.problem.operations, MOST_TIMINGS)
        for start in [*self.best]:
            budget //= 2
            if self.is_optimal or budget < 2:
                return
            improved = improve(self.problem, start.orders, budget, self.bound)
            if improved.ticks < start.ticks:
                origin = start.origin if start.origin.endswith("moves") else f"{start.origin} and moves"
                self.add(origin, improved.orders)


def _rules(problem: Problem) -> list[tuple[float, Rule]]:
    """Every combination of a stretch and a rule, shuffled so that the first few differ in everything."""
    of_1f1b = 2 * problem.chunks * problem.ranks
    usual = [min(problem.capacity, int(of_1f1b * factor)) for factor in CAPACITIES]
    if problem.capacity > usual[-1]:
        capacities = usual  # more memory is no faster
    elif usual[0] >= 2 * problem.chunks:
        capacities = list(dict.fromkeys([problem.capacity, *usual]))
    else:
        capacities = [problem.capacity]
    rules = [
        (stretch, Rule(patience, fill, capacity, in_flight_limits(problem, capacity, extra)))
        for extra, capacity, stretch, patience, fill in product(
            EXTRA_IN_FLIGHT, capacities, STRETCHES, PATIENCES, FILLS
        )
    ]
    random.Random(len(rules)).shuffle(rules)
    return rules


def fuse(streams: Sequence[tuple[Action, ...]], stages: range) -> tuple[tuple[Action, ...], ...]:
    """Makes each B of these stages and its W one BW where W follows at once."""
    fused = []
    for stream in streams:
        actions: list[Action] = []
        for action in stream:
            op, stage, mb = action.key
            if op is Op.W and stage in stages and actions and actions[-1].key == (Op.B, stage, mb):
                actions[-1] = Instruction(Op.BW, stage, mb)
            else:
                actions.append(action)
        fused.append(tuple(actions))
    return tuple(fused)


def candidate_streams(search: Search) -> Iterator[tuple[str, tuple[tuple[Action, ...], ...]]]:
    """(origin, streams) of the best orders, twice each: with BW on stage 0 only, where no other rank waits for B, and
    with BW on all stages."""
    for found in search.best:
        streams = streams_of(search.problem, found.orders)
        yield found.origin, fuse(streams, range(1))
        yield found.origin, fuse(streams, range(search.problem.stages))
