"""List scheduling: a free rank runs the most urgent operation that is there, and weight gradients in the gaps.

A forward starts only where the microbatches begun can still be brought to their end within the room, the oldest first
(the banker's rule, Dijkstra 1965, EWD 108): so ranks never block one another, however little room there is.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import accumulate
from math import floor, inf
from typing import NamedTuple

from pentad.schedules.search.search_problem import Orders, Problem

F, B, W = range(3)
Urgency = Sequence[float]  # by operation: the least runs first


class Rule(NamedTuple):
    """`patience`: a rank waits for something more urgent that comes before this share of what it could run has passed.
    `share`: a weight gradient fills a gap of at least this share of its time. `room`: half activations of a chunk that
    each rank keeps at most. `caps`: microbatches that each stage keeps between their F and their B at most.
    """

    patience: float
    share: float
    room: tuple[int, ...]
    caps: tuple[float, ...]


def caps_of(problem: Problem, room: tuple[int, ...], more: float) -> tuple[float, ...]:
    """Shares of each rank's room by how long its stages keep a microbatch, and so many microbatches more."""
    forward, backward, _ = problem.work
    kept, caps = 0.0, [0.0] * problem.stages
    for stage in reversed(range(problem.stages)):
        caps[stage] = kept + forward[stage] + backward[stage] / 2
        kept += forward[stage] + backward[stage]
    for rank, held in enumerate(problem.placement):
        share = room[rank] / 2 / sum(caps[stage] for stage in held)
        for stage in held:
            caps[stage] = max(1.0, floor(caps[stage] * share + more)) if more < inf else inf
    return tuple(caps)


def by_age(problem: Problem, stretch: float, lag: float) -> Urgency:
    """Microbatches by age, their ways stretched: at 0 the oldest goes first, at 1 the one that would come first were
    each begun one bottleneck after the other. A W goes `lag` bottlenecks after its B (infinite: only in gaps)."""
    forward, backward, _ = problem.work
    period = max(sum(problem.work[kind][s] for kind in range(3) for s in held) for held in problem.placement)
    down = list(accumulate(forward, initial=0))
    up = list(accumulate(reversed(backward), initial=down[-1]))
    offsets = [stretch * each for each in (*down[:-1], *reversed(up[:-1]))]
    offsets += [each + lag * period for each in offsets[problem.stages :]]
    return [offset + mb * period for offset in offsets for mb in range(problem.microbatches)]


def listed(problem: Problem, urgency: Urgency, rule: Rule) -> Orders:
    """A whole step. `rule.room` is at least one microbatch a rank."""
    line = _Line(problem, urgency, rule)
    turns = [(0, rank) for rank in range(problem.ranks)]
    while turns:
        now, rank = heappop(turns)
        if now < line.clock[rank]:
            continue  # busy; its next turn is set
        each = line.choose(rank, now)
        if each < 0:
            continue  # nothing is there; what comes brings a turn
        end = line.run(rank, each, now)
        heappush(turns, (end, rank))
        target, arrival = line.receiver(each, end)
        if target not in (-1, rank):
            heappush(turns, (arrival, target))
    return line.orders


class _Line:
    def __init__(self, problem: Problem, urgency: Urgency, rule: Rule) -> None:
        self.problem, self.urgency, self.rule = problem, urgency, rule
        self.many = problem.microbatches
        self.size = problem.stages * problem.microbatches
        self.orders: Orders = [[] for _ in problem.placement]
        self.clock = [0] * problem.ranks
        self.ends = [-1] * problem.size
        self.done = [[0] * problem.stages for _ in range(3)]
        self.kept = [0] * problem.ranks  # once every W that is due has run
        self.due = [0] * problem.ranks

    def choose(self, rank: int, now: int) -> int:
        """The operation to run; -1 to wait."""
        urgency, ends, many, size = self.urgency, self.ends, self.many, self.size
        needs, hops = self.problem.needs, self.problem.hops
        forwards, backwards, weights = self.done
        best = weight = -1
        soon, urgent = inf, []
        for stage in self.problem.placement[rank]:
            mb = forwards[stage]
            if mb < many:
                each = stage * many + mb
                need = needs[each]
                come = 0 if need < 0 else ends[need] + hops[each] if ends[need] >= 0 else -1
                if come >= 0 and self._fits(rank, stage):
                    if come > now:
                        soon = min(soon, come)
                        urgent.append((come, urgency[each]))
                    elif best < 0 or urgency[each] < urgency[best]:
                        best = each
            mb = backwards[stage]
            if mb < forwards[stage]:
                each = size + stage * many + mb
                need = needs[each]
                if ends[need] >= 0:
                    come = ends[need] + hops[each]
                    if come > now:
                        soon = min(soon, come)
                        urgent.append((come, urgency[each]))
                    elif best < 0 or urgency[each] < urgency[best]:
                        best = each
            if weights[stage] < mb:
                each = 2 * size + stage * many + weights[stage]
                if weight < 0 or urgency[each] < urgency[weight]:
                    weight = each
        return self._settle(rank, now, best, weight, soon, urgent)

    def _settle(self, rank: int, now: int, best: int, weight: int, soon: float, urgent: list[tuple[int, float]]) -> int:
        """Of the most urgent operation that is there, the most urgent W and what comes `soon`."""
        seconds, rule = self.problem.seconds, self.rule
        if best >= 0:
            until = now + rule.patience * seconds[best]
            if not any(come < until and before < self.urgency[best] for come, before in urgent):
                if weight >= 0 and (
                    self.urgency[weight] < self.urgency[best]
                    or (best < self.size and self.kept[rank] + self.due[rank] + 2 > rule.room[rank])
                ):
                    return weight
                return best
        return weight if weight >= 0 and now + rule.share * seconds[weight] <= soon else -1

    def run(self, rank: int, each: int, now: int) -> int:
        end = now + self.problem.seconds[each]
        kind, place = divmod(each, self.size)
        self.done[kind][place // self.many] += 1
        self.kept[rank] += (2, -2, 0)[kind]
        self.due[rank] += (0, 1, -1)[kind]
        self.clock[rank] = self.ends[each] = end
        self.orders[rank].append(each)
        return end

    def receiver(self, each: int, end: int) -> tuple[int, int]:
        """The rank that an operation's result goes to, -1 for none, and when it comes there."""
        kind, place = divmod(each, self.size)
        stage = place // self.many + (1 if kind == F else -1)
        if kind == W or not 0 <= stage < self.problem.stages:
            return -1, 0
        after = each + (self.many if kind == F else -self.many)
        return self.problem.home[stage], end + self.problem.hops[after]

    def _fits(self, rank: int, stage: int) -> bool:
        """Whether one more forward leaves room to end all microbatches that have begun, the oldest first."""
        held = self.problem.placement[rank]
        if self.done[F][stage] - self.done[B][stage] >= self.rule.caps[stage]:
            return False
        free = self.rule.room[rank] - self.kept[rank] - 2
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
