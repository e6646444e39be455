"""What the search orders: the compute of one step as numbered operations with integer times.

The number of an operation is `(kind * stages + stage) * microbatches + microbatch`; `number // microbatches` is called
its code. Microbatches of one code stay in order, so an order only decides how codes alternate on a rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from math import floor, inf, log10
from typing import Literal, NamedTuple

from pentad.schedules.ir.instruction import Action, Instruction, Op
from pentad.schedules.simulate.costs import Costs

Objective = Literal["makespan", "longest"]
Orders = list[list[int]]  # operations of every rank
KINDS = (Op.F, Op.B, Op.W)
MEMORY = (2, -1, -1)  # by kind, change in saved activations, in half activations of a chunk
DIGITS = 10  # of the largest cost that a tick resolves


class Timing(NamedTuple):
    """`starts` and `ends` by operation, in ticks; `sequence` lists every operation after those that it needs."""

    starts: list[int]
    ends: list[int]
    sequence: list[int]


@dataclass(frozen=True)
class Problem:
    """`placement[rank]` lists its stages, each on one rank only; `capacity` is the most half activations of a chunk
    that a rank may save. Times are integers (ticks), so that equal sums compare equal."""

    placement: tuple[tuple[int, ...], ...]
    microbatches: int
    chunks: int
    costs: Costs
    capacity: int
    objective: Objective = "makespan"

    @property
    def ranks(self) -> int:
        return len(self.placement)

    @cached_property
    def stages(self) -> int:
        return sum(map(len, self.placement))

    @cached_property
    def size(self) -> int:
        """The number of operations of each kind."""
        return self.stages * self.microbatches

    @property
    def operations(self) -> int:
        return len(KINDS) * self.size

    @cached_property
    def rank_of(self) -> tuple[int, ...]:
        """Rank by stage."""
        return tuple(rank for _, rank in sorted((s, r) for r, stages in enumerate(self.placement) for s in stages))

    def rank_running(self, operation: int) -> int:
        return self.rank_of[operation // self.microbatches % self.stages]

    @cached_property
    def tick(self) -> float:
        costs = self.costs
        return 10.0 ** (floor(log10(max(costs.forward + costs.backward + costs.weight))) - DIGITS)

    @cached_property
    def durations(self) -> tuple[tuple[int, ...], ...]:
        """Ticks by kind and stage."""
        return tuple(
            tuple(
                round(self.costs.seconds_on(self.rank_of[stage], Instruction(op, stage)) / self.tick)
                for stage in range(self.stages)
            )
            for op in KINDS
        )

    @cached_property
    def ticks(self) -> list[int]:
        """Duration of every operation."""
        return [each for kind in self.durations for each in kind for _ in range(self.microbatches)]

    @cached_property
    def inputs(self) -> list[int]:
        """By operation, the one whose result it reads: for F, that of the stage before; for B, that of the stage after
        or, on the last stage, its own F; -1 for none. A W has none: the order of its rank puts it after its B."""
        size, many = self.size, self.microbatches
        forward = [-1] * many + list(range(size - many))
        backward = [*range(size + many, 2 * size), *range(size - many, size)]
        return forward + backward + [-1] * size

    @cached_property
    def readers(self) -> list[int]:
        """By operation, the one of another stage that reads its result; -1 for none."""
        size, many = self.size, self.microbatches
        return [*range(many, size), *[-1] * 2 * many, *range(size, 2 * size - many), *[-1] * size]

    @cached_property
    def delays(self) -> list[int]:
        """By operation, ticks that its input takes from rank to rank."""

        def hop(source: int, target: int) -> int:
            return round(self.costs.hop(self.rank_of[source], self.rank_of[target]) / self.tick)

        down = [0, *(hop(stage - 1, stage) for stage in range(1, self.stages))]
        up = [*(hop(stage + 1, stage) for stage in range(self.stages - 1)), 0]
        return [hop for hops in (down, up, [0] * self.stages) for hop in hops for _ in range(self.microbatches)]

    @cached_property
    def first_starts(self) -> tuple[int, ...]:
        """By rank, the earliest tick at which it can begin."""
        arrivals, clock = [], 0
        for stage in range(self.stages):
            clock += self.delays[stage * self.microbatches]
            arrivals.append(clock)
            clock += self.durations[0][stage]
        return tuple(arrivals[min(stages)] for stages in self.placement)

    @cached_property
    def handicaps(self) -> tuple[int, ...]:
        """By rank, ticks to add to its end. For `longest` a rank that begins earlier than the last one takes longer."""
        return tuple((max(self.first_starts) - start) * (self.objective == "longest") for start in self.first_starts)

    def to_cost(self, ticks: int) -> float:
        """`step_ticks` as the objective, in the unit of the costs."""
        return (ticks - max(self.first_starts) * (self.objective == "longest")) * self.tick

    def to_ticks(self, cost: float) -> int:
        """The inverse of `to_cost`."""
        return round(cost * (1 + 1e-12) / self.tick) + max(self.first_starts) * (self.objective == "longest")


def capacity_of(limit: float | None, chunks: int, microbatches: int) -> int:
    """`Problem.capacity` for a limit in microbatches of all layers of a rank; None: no limit."""
    return floor(2 * chunks * min(inf if limit is None else limit, microbatches) + 1e-6)


def times_of(problem: Problem, orders: Orders) -> Timing | None:
    """Every operation as early as its rank and its input allow; None if ranks wait for one another forever."""
    inputs, delays, ticks = problem.inputs, problem.delays, problem.ticks
    starts, ends, sequence = [0] * problem.operations, [-1] * problem.operations, []
    at, clock, waiting = [0] * problem.ranks, [0] * problem.ranks, {}  # waiting: input -> rank
    ready = list(range(problem.ranks))
    while ready:
        rank = ready.pop()
        order, now = orders[rank], clock[rank]
        for index in range(at[rank], len(order)):
            each = order[index]
            needed = inputs[each]
            if needed >= 0:
                end = ends[needed]
                if end < 0:
                    waiting[needed] = rank
                    at[rank] = index
                    break
                end += delays[each]
                if end > now:
                    now = end
            starts[each] = now
            now += ticks[each]
            ends[each] = now
            sequence.append(each)
            if each in waiting:
                ready.append(waiting.pop(each))
        else:
            at[rank] = len(order)
        clock[rank] = now
    return Timing(starts, ends, sequence) if len(sequence) == sum(map(len, orders)) else None


def tails(problem: Problem, orders: Orders, sequence: list[int]) -> list[int]:
    """By operation, ticks that must pass between its end and the end of the step, handicaps included."""
    inputs, delays, ticks = problem.inputs, problem.delays, problem.ticks
    before, after = [-1] * problem.operations, [0] * problem.operations
    for order, handicap in zip(orders, problem.handicaps, strict=True):
        after[order[-1]] = handicap
        for first, then in pairwise(order):
            before[then] = first
    for each in reversed(sequence):
        left = after[each] + ticks[each]
        other = before[each]
        if other >= 0 and after[other] < left:
            after[other] = left
        other = inputs[each]
        if other >= 0 and after[other] < left + delays[each]:
            after[other] = left + delays[each]
    return after


def step_ticks(problem: Problem, orders: Orders, ends: Sequence[int]) -> int:
    """The latest end of a rank with its handicap: what the search minimizes."""
    return max(ends[order[-1]] + handicap for order, handicap in zip(orders, problem.handicaps, strict=True))


def peak_memory(problem: Problem, order: list[int]) -> int:
    """Most half activations of a chunk that a rank saves at once."""
    return max(accumulate(MEMORY[each // problem.size] for each in order))


def streams_of(problem: Problem, orders: Orders) -> tuple[tuple[Action, ...], ...]:
    def instruction(each: int) -> Instruction:
        code, microbatch = divmod(each, problem.microbatches)
        kind, stage = divmod(code, problem.stages)
        return Instruction(KINDS[kind], stage, microbatch)

    return tuple(tuple(map(instruction, order)) for order in orders)


def orders_of(problem: Problem, streams: Sequence[Sequence[Action]]) -> Orders:
    """The operations of a program, a BW as B and W, an overlapped pair as its halves."""
    code = {op: kind * problem.stages for kind, op in enumerate(KINDS)} | {Op.BW: problem.stages}
    orders: Orders = []
    for stream in streams:
        order: list[int] = []
        for part in (part for action in stream for part in action.parts):
            each = (code[part.op] + part.stage) * problem.microbatches + part.microbatch
            order += (each, each + problem.size) if part.op is Op.BW else (each,)
        orders.append(order)
    return orders
