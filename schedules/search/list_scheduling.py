"""List scheduling: a rank that is free runs its most urgent operation whose input has arrived; W fills gaps.

A forward starts only if all microbatches in progress can still be finished within the capacity, the oldest first (the
banker's algorithm, Dijkstra 1965, EWD 108). So ranks never block one another, however small the capacity is.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import accumulate
from math import floor, inf
from typing import NamedTuple

from pentad.schedules.search.problem import Orders, Problem

F, B, W = range(3)
Priority = Sequence[float]  # by F and B: the lowest runs first


class Rule(NamedTuple):
    """`patience`: a rank waits for a more urgent operation if that arrives within this share of the duration of what it
    could run now. `fill`: W fills a gap that is at least this share of its duration. `capacity`: as in `Problem`.
    `in_flight`: by stage, the most microbatches between their F and their B.
    """

    patience: float
    fill: float
    capacity: int
    in_flight: tuple[float, ...]


def in_flight_limits(problem: Problem, capacity: int, extra: float) -> tuple[float, ...]:
    """By stage, its share of its rank's capacity, in proportion to how long a microbatch is saved there, plus `extra`;
    an infinite `extra` means no limit."""
    if extra == inf:
        return (inf,) * problem.stages
    forward, backward, _ = problem.durations
    below, saved = 0.0, [0.0] * problem.stages
    for stage in reversed(range(problem.stages)):
        saved[stage] = below + forward[stage] + backward[stage] / 2
        below += forward[stage] + backward[stage]
    shares = [capacity / 2 / sum(saved[stage] for stage in held) for held in problem.placement]
    by_rank = zip(saved, problem.rank_of, strict=True)
    return tuple(max(1.0, floor(each * shares[rank] + extra)) for each, rank in by_rank)


def age_priority(problem: Problem, stretch: float) -> Priority:
    """Microbatches by age. With `stretch` 0 the oldest goes first, with 1 the one that would arrive first if
    microbatches began one period of the bottleneck rank apart."""
    forward, backward, _ = problem.durations
    period = max(sum(problem.durations[kind][s] for kind in range(3) for s in held) for held in problem.placement)
    down = list(accumulate(forward, initial=0))
    up = list(accumulate(reversed(backward), initial=down[-1]))
    offsets = [stretch * each for each in (*down[:-1], *reversed(up[:-1]))]
    return [offset + mb * period for offset in offsets for mb in range(problem.microbatches)]


def list_schedule(problem: Problem, priority: Priority, rule: Rule) -> Orders:
    """Orders of a step. `rule.capacity` must hold at least one microbatch of every stage of a rank."""
    scheduler = _Scheduler(problem, priority, rule)
    wakeups = [(0, rank) for rank in range(problem.ranks)]
    while wakeups:
        now, rank = heappop(wakeups)
        if now < scheduler.clock[rank]:
            continue  # busy: there is a wakeup when it is free
        each = scheduler.choose(rank, now)
        if each < 0:
            continue  # nothing to run: an arrival brings a wakeup
        end = scheduler.run(rank, each, now)
        heappush(wakeups, (end, rank))
        reader = problem.readers[each]
        if reader >= 0 and (target := problem.rank_running(reader)) != rank:
            heappush(wakeups, (end + problem.delays[reader], target))
    return scheduler.orders


class _Scheduler:
    def __init__(self, problem: Problem, priority: Priority, rule: Rule) -> None:
        self.problem, self.priority, self.rule = problem, priority, rule
        self.orders: Orders = [[] for _ in problem.placement]
        self.clock = [0] * problem.ranks
        self.ends = [-1] * problem.operations
        self.done = [[0] * problem.stages for _ in range(3)]  # microbatches by kind and stage
        self.saved = [0] * problem.ranks  # half activations, not counting what waits for W only
        self.due = [0] * problem.ranks  # W that can run: a half activation each

    def choose(self, rank: int, now: int) -> int:
        """The operation to run; -1 to wait."""
        priority, ends, many, size = self.priority, self.ends, self.problem.microbatches, self.problem.size
        inputs, delays = self.problem.inputs, self.problem.delays
        forwards, backwards, weights = self.done
        best = weight = -1
        coming = []  # (arrival, priority)
        for stage in self.problem.placement[rank]:
            next_ones = [stage * many + forwards[stage]] if forwards[stage] < many else []
            if backwards[stage] < forwards[stage]:
                next_ones.append(size + stage * many + backwards[stage])
            for each in next_ones:
                needed = inputs[each]
                if needed >= 0 and ends[needed] < 0:
                    continue
                arrival = 0 if needed < 0 else ends[needed] + delays[each]
                if each < size and not self._fits(rank, stage):
                    continue
                if arrival > now:
                    coming.append((arrival, priority[each]))
                elif best < 0 or priority[each] < priority[best]:
                    best = each
            if weight < 0 and weights[stage] < backwards[stage]:
                weight = 2 * size + stage * many + weights[stage]
        return self._decide(rank, now, best, weight, coming)

    def _decide(self, rank: int, now: int, best: int, weight: int, coming: list[tuple[int, float]]) -> int:
        """Decides between the most urgent F or B whose input has arrived, a W, and waiting for what is coming."""
        ticks, rule = self.problem.ticks, self.rule
        if best >= 0:
            until = now + rule.patience * ticks[best]
            if not any(arrival < until and urgency < self.priority[best] for arrival, urgency in coming):
                full = best < self.problem.size and self.saved[rank] + self.due[rank] + 2 > rule.capacity
                return weight if weight >= 0 and full else best
        gap_ends = min((arrival for arrival, _ in coming), default=inf)
        return weight if weight >= 0 and now + rule.fill * ticks[weight] <= gap_ends else -1

    def run(self, rank: int, each: int, now: int) -> int:
        """Appends an operation to a rank's order and returns its end."""
        end = now + self.problem.ticks[each]
        kind, place = divmod(each, self.problem.size)
        self.done[kind][place // self.problem.microbatches] += 1
        self.saved[rank] += (2, -2, 0)[kind]
        self.due[rank] += (0, 1, -1)[kind]
        self.clock[rank] = self.ends[each] = end
        self.orders[rank].append(each)
        return end

    def _fits(self, rank: int, stage: int) -> bool:
        """Whether all microbatches in progress can still be finished after one more forward, the oldest first."""
        held = self.problem.placement[rank]
        if self.done[F][stage] - self.done[B][stage] >= self.rule.in_flight[stage]:
            return False
        free = self.rule.capacity - self.saved[rank] - 2
        if free >= 2 * (len(held) - 1):
            return True
        if free < 0:
            return False
        forwards, backwards, _ = self.done
        begun = {s: forwards[s] + (s == stage) for s in held}
        for mb in range(min(backwards[s] for s in held), max(begun.values())):
            if 2 * sum(begun[s] <= mb for s in held) > free:
                return False
            free += 2 * sum(backwards[s] <= mb < begun[s] for s in held)
        return True
