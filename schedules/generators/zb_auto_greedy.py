"""The greedy heuristic of the automatic zero-bubble scheduler: one order per setting of three options.

Qi et al. 2023, arXiv 2401.10241, section 3.1 and appendix: forwards fill the warm-up; then come rounds of at most one
forward and one backward per rank, with weight gradients in the gaps or where memory runs out; the rest follows.
"""

from __future__ import annotations

from math import floor, log10
from typing import NamedTuple

from pentad.schedules.ir.instruction import Instruction, Op
from pentad.schedules.simulate.costs import Costs

DIGITS = 12  # significant digits of the most expensive operation
NEVER = 1 << 100  # ticks


class GreedyOptions(NamedTuple):
    """`extra_warm_up`: the last warm-up forward may delay the first backward. `hold_forward`: hold a forward back if
    the next rank is two forwards behind and its gradient is worth waiting for. `eager_weight`: a weight gradient may
    delay the next operation even on the rank that idles most.
    """

    extra_warm_up: bool
    hold_forward: bool
    eager_weight: bool


class TickCosts(NamedTuple):
    """Costs by rank, in integer ticks so that equal sums compare equal. A hop is listed at the rank that receives."""

    forward: list[int]
    backward: list[int]
    weight: list[int]
    forward_hop: list[int]
    backward_hop: list[int]


def tick_costs(costs: Costs, ranks: int) -> TickCosts:
    tick = 10.0 ** (floor(log10(max(costs.forward + costs.backward + costs.weight))) - DIGITS)

    def ticks(op: Op, senders: range, step: int = 0) -> list[int]:
        return [round(costs.seconds_on(rank, Instruction(op, rank, peer=rank + step)) / tick) for rank in senders]

    forward, backward, weight = (ticks(op, range(ranks)) for op in (Op.F, Op.B, Op.W))
    forward_hop, backward_hop = ticks(Op.SEND_F, range(ranks - 1), 1), ticks(Op.SEND_B, range(1, ranks), -1)
    return TickCosts(forward, backward, weight, [0, *forward_hop], [*backward_hop, 0])


class Pipeline:
    """A simulated pipeline with one stage per rank. Operations are appended to ranks one by one and start as early as
    their inputs allow.

    Memory is counted in half microbatches of activations, of which B frees one and W the other; `memory_limit` is in
    microbatches, from 1 to `microbatches`.
    """

    def __init__(self, costs: TickCosts, microbatches: int, memory_limit: float) -> None:
        self.ranks, self.microbatches = len(costs.forward), microbatches
        self.memory_limit = floor(2 * memory_limit)
        self.costs = costs
        self.streams: list[list[Op]] = [[] for _ in range(self.ranks)]
        self.clock = [0] * self.ranks
        self.idle = [0] * self.ranks  # since the rank's first forward
        self.saved = [0] * self.ranks
        self.peak = 0  # the most that any rank has saved
        self.pending = [0] * self.ranks  # weight gradients that could run now
        # By rank and microbatch: when F and B end, and when the stage before or after has made their input (at the ends
        # of the pipeline: at once).
        self.forward_ends: list[list[int]] = [[] for _ in range(self.ranks)]
        self.backward_ends: list[list[int]] = [[] for _ in range(self.ranks)]
        at_once = [0] * microbatches
        self.activations = [at_once, *self.forward_ends[:-1]]
        self.gradients = [*self.backward_ends[1:], at_once]

    def next_activation(self, rank: int) -> int:
        """When the input of a rank's next F arrives; NEVER if nothing has produced it yet."""
        produced, mb = self.activations[rank], len(self.forward_ends[rank])
        return produced[mb] + self.costs.forward_hop[rank] if mb < len(produced) else NEVER

    def next_gradient(self, rank: int) -> int:
        """When the input of a rank's next B arrives; NEVER if nothing has produced it, or the F is missing."""
        produced, mb = self.gradients[rank], len(self.backward_ends[rank])
        exists = mb < len(produced) and mb < len(self.forward_ends[rank])
        return produced[mb] + self.costs.backward_hop[rank] if exists else NEVER

    def run(self, rank: int, op: Op) -> None:
        if op is Op.F:
            end = self._start(rank, self.next_activation(rank)) + self.costs.forward[rank]
            self.forward_ends[rank].append(end)
            self.saved[rank] = saved = self.saved[rank] + 2
            self.peak = max(self.peak, saved)
        else:
            self.saved[rank] -= 1
            if op is Op.B:
                end = self._start(rank, self.next_gradient(rank)) + self.costs.backward[rank]
                self.backward_ends[rank].append(end)
                self.pending[rank] += 1
            else:
                end = self.clock[rank] + self.costs.weight[rank]
                self.pending[rank] -= 1
        self.clock[rank] = end
        self.streams[rank].append(op)

    def run_weights(self, rank: int, count: int) -> None:
        for _ in range(count):
            self.run(rank, Op.W)

    def _start(self, rank: int, arrival: int) -> int:
        clock = self.clock[rank]
        if arrival <= clock:
            return clock
        if self.streams[rank]:
            self.idle[rank] += arrival - clock
        return arrival

    def weights_before_forward(self, rank: int) -> int:
        """Weight gradients that must run before the next forward fits into memory; it fits already if not positive."""
        return self.saved[rank] + 2 - self.memory_limit

    def idle_allowance(self, rank: int) -> int:
        """How much longer a rank may idle before it idles most of all."""
        return max(self.idle) - self.idle[rank]

    def durations(self) -> tuple[int, int]:
        """Longest (busiest rank from first start to last end) and makespan."""
        starts = [ends[0] - cost for ends, cost in zip(self.forward_ends, self.costs.forward, strict=True)]
        return max(end - start for end, start in zip(self.clock, starts, strict=True)), max(self.clock)


def run_greedy(pipeline: Pipeline, options: GreedyOptions) -> Pipeline:
    """Runs a whole step."""
    warm_up(pipeline, extra_warm_up=options.extra_warm_up)
    for _ in range(1, pipeline.microbatches):
        _forward_round(pipeline, options)
        _backward_round(pipeline, options.eager_weight)
    for rank in range(pipeline.ranks):
        pipeline.run_weights(rank, pipeline.pending[rank])
    return pipeline


def warm_up(pipeline: Pipeline, *, extra_warm_up: bool) -> Pipeline:
    """Up to the first backward of every rank: forwards in the time that its gradient takes to arrive."""
    for rank in range(pipeline.ranks):
        pipeline.run(rank, Op.F)
    for rank, more in enumerate(_more_warm_up_forwards(pipeline, extra_warm_up)):
        for _ in range(more):
            pipeline.run(rank, Op.F)
    for rank in reversed(range(pipeline.ranks)):
        pipeline.run(rank, Op.B)
    return pipeline


def _more_warm_up_forwards(pipeline: Pipeline, extra_warm_up: bool) -> list[int]:
    """By rank: the forwards of its warm-up after the first one."""
    more, costs, last = [0] * pipeline.ranks, pipeline.costs, pipeline.ranks - 1
    gradient = 0  # when the next rank has produced it
    for rank in reversed(range(pipeline.ranks)):
        clock, forward = pipeline.clock[rank], costs.forward[rank]
        gradient += costs.backward_hop[rank]
        while rank < last and 1 + more[rank] < pipeline.microbatches and 2 * (2 + more[rank]) <= pipeline.memory_limit:
            if gradient <= clock if extra_warm_up else gradient < clock + forward:
                break
            clock += forward
            more[rank] += 1
        gradient = max(clock, gradient) + costs.backward[rank]
    # A rank's forwards come one step after those of the rank before, so it has one fewer, unless all have run there.
    for rank in range(1, pipeline.ranks):
        before = more[rank - 1]
        has_all = 1 + before == pipeline.microbatches
        more[rank] = min(more[rank], before if has_all else max(before - 1, 0))
    return more


def _forward_round(pipeline: Pipeline, options: GreedyOptions) -> None:
    """At most one forward per rank; a rank without one excludes the ranks before it."""
    runs = [_runs_forward(pipeline, rank, options.hold_forward) for rank in range(pipeline.ranks)]
    for rank in reversed(range(pipeline.ranks - 1)):
        runs[rank] = runs[rank] and runs[rank + 1]
    for rank in range(pipeline.ranks):
        if runs[rank]:
            pipeline.run_weights(rank, pipeline.weights_before_forward(rank))
            _fill_gap(pipeline, rank, pipeline.next_activation(rank), options.eager_weight)
            pipeline.run(rank, Op.F)


def _backward_round(pipeline: Pipeline, eager_weight: bool) -> None:
    """One backward per rank, from the last rank to the first."""
    for rank in reversed(range(pipeline.ranks)):
        _fill_gap(pipeline, rank, pipeline.next_gradient(rank), eager_weight)
        if rank == 0 and len(pipeline.forward_ends[rank]) == pipeline.microbatches:  # nothing waits for its backwards
            pipeline.run_weights(rank, pipeline.pending[rank])
        pipeline.run(rank, Op.B)


def _fill_gap(pipeline: Pipeline, rank: int, until: int, eager_weight: bool) -> None:
    """Weight gradients into the gap before `until`; the last one may end later."""
    weight = pipeline.costs.weight[rank]
    while pipeline.pending[rank] and pipeline.clock[rank] + weight <= until:
        pipeline.run(rank, Op.W)
    gap = until - pipeline.clock[rank]
    if pipeline.pending[rank] and gap > 0 and (eager_weight or gap > pipeline.idle_allowance(rank)):
        pipeline.run(rank, Op.W)


def _runs_forward(pipeline: Pipeline, rank: int, hold_forward: bool) -> bool:
    done = len(pipeline.forward_ends[rank])
    weights = pipeline.weights_before_forward(rank)
    if done == pipeline.microbatches or weights > pipeline.pending[rank]:
        return False
    after = rank + 1
    if not hold_forward or after == pipeline.ranks or done < len(pipeline.forward_ends[after]) + 2:
        return True
    # The next rank already has the input of its next forward: is the gradient that follows worth waiting for?
    costs = pipeline.costs
    gradient = pipeline.clock[after] + costs.forward[after] + costs.backward[after] + costs.backward_hop[rank]
    gap = gradient - pipeline.clock[rank]
    if gap <= 0:
        return False
    fits = costs.forward[rank] + max(weights, 0) * costs.weight[rank] <= gap
    return fits or gap > pipeline.idle_allowance(rank)
