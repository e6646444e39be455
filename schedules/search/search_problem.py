"""What the search orders: one step as numbered operations with whole times, and the timing of an order of them.

An operation's number is `(kind * stages + stage) * microbatches + microbatch`. Microbatches keep their order within a
kind and a stage, so that an order only says how kinds and stages take turns on a rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import floor, inf, log10
from typing import Literal, NamedTuple

from pentad.schedules.ir.instruction import Instruction, Op, Unit
from pentad.schedules.simulate.costs import Costs

By = Literal["makespan", "longest"]
Orders = list[list[int]]
KINDS = (Op.F, Op.B, Op.W)
UNITS = (2, -1, -1)  # half activations of a chunk that a kind adds
DIGITS = 10  # of the dearest operation that are told apart


class Timing(NamedTuple):
    """`starts` and `ends` by operation, and `sequence`, an order of all in which each comes after what it needs."""

    starts: list[int]
    ends: list[int]
    sequence: list[int]


@dataclass(frozen=True)
class Problem:
    """A step to order: `placement[rank]` are its stages, each on one rank. Times are whole ticks, so that equal sums
    compare equal. `room[rank]` is the most half activations of a chunk that it may keep."""

    placement: tuple[tuple[int, ...], ...]
    microbatches: int
    chunks: int
    costs: Costs
    room: tuple[int, ...]
    by: By = "makespan"

    @property
    def ranks(self) -> int:
        return len(self.placement)

    @cached_property
    def stages(self) -> int:
        return sum(map(len, self.placement))

    @cached_property
    def size(self) -> int:
        return 3 * self.stages * self.microbatches

    @cached_property
    def home(self) -> tuple[int, ...]:
        """The rank of each stage."""
        return tuple(rank for _, rank in sorted((s, r) for r, stages in enumerate(self.placement) for s in stages))

    @cached_property
    def tick(self) -> float:
        of = self.costs
        return 10.0 ** (floor(log10(max(of.forward + of.backward + of.weight))) - DIGITS)

    @cached_property
    def work(self) -> tuple[tuple[int, ...], ...]:
        """Ticks by kind and stage."""
        return tuple(
            tuple(round(self.costs.on(self.home[s], Instruction(op, s)) / self.tick) for s in range(self.stages))
            for op in KINDS
        )

    @cached_property
    def seconds(self) -> list[int]:
        """Ticks of every operation."""
        return [each for kind in self.work for each in kind for _ in range(self.microbatches)]

    @cached_property
    def needs(self) -> list[int]:
        """The operation on another stage, or the forward, whose result each one reads; -1: none. That a W comes after
        its B is up to the order of its rank."""
        size, last = self.stages * self.microbatches, (self.stages - 1) * self.microbatches
        forward = [-1] * self.microbatches + list(range(last))
        backward = [*range(size + self.microbatches, 2 * size), *range(last, size)]
        return forward + backward + [-1] * size

    @cached_property
    def hops(self) -> list[int]:
        """Ticks that the result of `needs` takes to come."""
        home = self.home
        down = [0, *(self._hop(home[s - 1], home[s]) for s in range(1, self.stages))]
        up = [*(self._hop(home[s + 1], home[s]) for s in range(self.stages - 1)), 0]
        return [hop for hops in (down, up, [0] * self.stages) for hop in hops for _ in range(self.microbatches)]

    @cached_property
    def heads(self) -> tuple[int, ...]:
        """When each rank can begin at the earliest."""
        come, clock = [], 0
        for stage in range(self.stages):
            clock += self.hops[stage * self.microbatches]
            come.append(clock)
            clock += self.work[0][stage]
        return tuple(come[min(stages)] for stages in self.placement)

    @cached_property
    def handicap(self) -> tuple[int, ...]:
        """Ticks added to a rank's end: by longest, what it began earlier than the last one to begin."""
        return tuple((max(self.heads) - head) * (self.by == "longest") for head in self.heads)

    def span(self, ticks: int) -> float:
        """The objective in the unit of the costs, of the greatest end and handicap."""
        return (ticks - max(self.heads) * (self.by == "longest")) * self.tick

    def ticks(self, time: float) -> int:
        """What `span` makes of it, rounded up to what an order can have."""
        return round(time * (1 + 1e-12) / self.tick) + max(self.heads) * (self.by == "longest")

    def _hop(self, source: int, target: int) -> int:
        return round(self.costs.hop(source, target) / self.tick)


def room_of(limit: float | None, chunks: int, ranks: int, microbatches: int) -> tuple[int, ...]:
    """Half activations of a chunk that every rank may keep under a limit in microbatches of a whole rank."""
    most = inf if limit is None else limit
    return (floor(2 * chunks * min(most, microbatches) + 1e-6),) * ranks


def timed(problem: Problem, orders: Orders) -> Timing | None:
    """Every operation as early as its rank and its inputs allow; None where ranks wait for one another for ever."""
    needs, hops, seconds = problem.needs, problem.hops, problem.seconds
    starts, ends, sequence = [0] * problem.size, [-1] * problem.size, []
    at, clock, asleep = [0] * problem.ranks, [0] * problem.ranks, {}
    ready = list(range(problem.ranks))
    while ready:
        rank = ready.pop()
        order, now = orders[rank], clock[rank]
        for index in range(at[rank], len(order)):
            each = order[index]
            need = needs[each]
            if need >= 0:
                end = ends[need]
                if end < 0:
                    asleep[need] = rank
                    at[rank] = index
                    break
                end += hops[each]
                if end > now:
                    now = end
            starts[each] = now
            now += seconds[each]
            ends[each] = now
            sequence.append(each)
            if each in asleep:
                ready.append(asleep.pop(each))
        else:
            at[rank] = len(order)
        clock[rank] = now
    return Timing(starts, ends, sequence) if len(sequence) == sum(map(len, orders)) else None


def tails(problem: Problem, orders: Orders, sequence: list[int]) -> list[int]:
    """Ticks that must pass after the end of each operation, the handicap of the rank that ends last among them."""
    needs, hops, seconds = problem.needs, problem.hops, problem.seconds
    before, after = [-1] * problem.size, [0] * problem.size
    for order, extra in zip(orders, problem.handicap, strict=True):
        after[order[-1]] = extra
        for first, then in pairwise(order):
            before[then] = first
    for each in reversed(sequence):
        left = after[each] + seconds[each]
        other = before[each]
        if other >= 0 and after[other] < left:
            after[other] = left
        other = needs[each]
        if other >= 0 and after[other] < left + hops[each]:
            after[other] = left + hops[each]
    return after


def length(problem: Problem, orders: Orders, ends: Sequence[int]) -> int:
    """The greatest end and handicap, in ticks."""
    return max(ends[order[-1]] + extra for order, extra in zip(orders, problem.handicap, strict=True))


def peak(problem: Problem, order: list[int]) -> int:
    """Most half activations of a chunk kept at once."""
    held = most = 0
    size = problem.stages * problem.microbatches
    for each in order:
        held += UNITS[each // size]
        most = max(most, held)
    return most


def streams_of(problem: Problem, orders: Orders) -> tuple[tuple[Unit, ...], ...]:
    def instruction(each: int) -> Instruction:
        place, microbatch = divmod(each, problem.microbatches)
        kind, stage = divmod(place, problem.stages)
        return Instruction(KINDS[kind], stage, microbatch)

    return tuple(tuple(map(instruction, order)) for order in orders)


def orders_of(problem: Problem, streams: Sequence[Sequence[Unit]]) -> Orders:
    """Numbers of a program's operations, a BW as B and W, and an overlapped pair as its two parts."""
    number = {op: kind * problem.stages for kind, op in enumerate(KINDS)} | {Op.BW: problem.stages}
    orders: Orders = []
    for stream in streams:
        order: list[int] = []
        for part in (part for unit in stream for part in unit.parts):
            each = (number[part.op] + part.stage) * problem.microbatches + part.microbatch
            order += (each, each + problem.stages * problem.microbatches) if part.op is Op.BW else (each,)
        orders.append(order)
    return orders
