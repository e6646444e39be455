"""The greedy heuristic of the automatic zero-bubble scheduler: one order per setting of three options.

Qi et al. 2023, arXiv 2401.10241, section 3.1 and appendix: forwards fill the warm-up; then come rounds of at most one
forward and one backward per rank, with weight gradients in the gaps or where memory runs out; the rest follows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import accumulate, product
from math import floor, log10
from operator import add
from typing import NamedTuple

from pentad.schedules.generators.best_of import Candidate
from pentad.schedules.ir.columns import CODE
from pentad.schedules.ir.instruction import Instruction, Op
from pentad.schedules.simulate.costs import Costs

DIGITS = 12  # significant digits of the most expensive operation
NEVER = 1 << 100  # ticks
F, B, W = (CODE[op] for op in (Op.F, Op.B, Op.W))  # an attribute of Op takes long to look up
ROUNDS = 8  # between two bounds


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
        self.streams: list[list[int]] = [[] for _ in range(self.ranks)]  # of op codes
        self.clock = [0] * self.ranks
        self.idle = [0] * self.ranks  # since the rank's first forward
        self.saved = [0] * self.ranks
        self.peak = 0  # the most that any rank has saved
        self.pending = [0] * self.ranks  # weight gradients that could run now
        self.hold_mattered = self.eager_mattered = False  # whether the option has changed anything so far
        # By rank and microbatch: when F and B end, and when the stage before or after has made their input (at the ends
        # of the pipeline: at once).
        self.forward_ends: list[list[int]] = [[] for _ in range(self.ranks)]
        self.backward_ends: list[list[int]] = [[] for _ in range(self.ranks)]
        at_once = [0] * microbatches
        self.activations = [at_once, *self.forward_ends[:-1]]
        self.gradients = [*self.backward_ends[1:], at_once]
        # By rank: from the end of its last B (`way_back`) or F (`round_trip`) to the end of the last microbatch's W on
        # rank 0.
        self.way_back = [*accumulate(map(add, costs.backward, costs.backward_hop), initial=costs.weight[0])][:-1]
        there = accumulate(map(add, costs.forward[:0:-1], costs.forward_hop[:0:-1]), initial=0)
        self.round_trip = [each + costs.backward[-1] + self.way_back[-1] for each in there][::-1]

    def next_activation(self, rank: int) -> int:
        """When the input of a rank's next F arrives; NEVER if nothing has produced it yet."""
        produced, mb = self.activations[rank], len(self.forward_ends[rank])
        return produced[mb] + self.costs.forward_hop[rank] if mb < len(produced) else NEVER

    def next_gradient(self, rank: int) -> int:
        """When the input of a rank's next B arrives; NEVER if nothing has produced it, or the F is missing."""
        produced, mb = self.gradients[rank], len(self.backward_ends[rank])
        exists = mb < len(produced) and mb < len(self.forward_ends[rank])
        return produced[mb] + self.costs.backward_hop[rank] if exists else NEVER

    def run(self, rank: int, op: int) -> None:
        if op == F:
            self.run_forward(rank)
        elif op == B:
            self.run_backward(rank)
        else:
            self.run_weights(rank, 1)

    def run_forward(self, rank: int) -> None:
        costs, ends, stream, start = self.costs, self.forward_ends[rank], self.streams[rank], self.clock[rank]
        arrival = self.activations[rank][len(ends)] + costs.forward_hop[rank]
        if arrival > start:
            if stream:
                self.idle[rank] += arrival - start
            start = arrival
        self.clock[rank] = end = start + costs.forward[rank]
        ends.append(end)
        self.saved[rank] = saved = self.saved[rank] + 2
        if saved > self.peak:
            self.peak = saved
        stream.append(F)

    def run_backward(self, rank: int) -> None:
        costs, ends, start = self.costs, self.backward_ends[rank], self.clock[rank]
        arrival = self.gradients[rank][len(ends)] + costs.backward_hop[rank]
        if arrival > start:
            self.idle[rank] += arrival - start
            start = arrival
        self.clock[rank] = end = start + costs.backward[rank]
        ends.append(end)
        self.saved[rank] -= 1
        self.pending[rank] += 1
        self.streams[rank].append(B)

    def run_weights(self, rank: int, count: int) -> None:
        if count > 0:
            self.clock[rank] += count * self.costs.weight[rank]
            self.saved[rank] -= count
            self.pending[rank] -= count
            self.streams[rank] += [W] * count

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

    def least_longest(self) -> int:
        """A lower bound of the longest of `durations`: each rank's work plus its idle time so far; and, as rank 0
        starts at 0, the time until the last microbatch, or its gradient, has made its way from each rank back to rank
        0.
        """
        costs, count, most = self.costs, self.microbatches, 0
        for rank, clock in enumerate(self.clock):
            forward, backward, weight = costs.forward[rank], costs.backward[rank], costs.weight[rank]
            most = max(most, count * (forward + backward + weight) + self.idle[rank])
            forwards, backwards = count - len(self.forward_ends[rank]), count - len(self.backward_ends[rank])
            if not backwards:
                most = max(most, self.backward_ends[rank][-1] + self.way_back[rank])
                continue
            most = max(most, clock + forwards * forward + backwards * backward + self.way_back[rank])
            if forwards:
                freeing = self._ticks_to_free(rank, self.saved[rank] + 2 * forwards - self.memory_limit)
                most = max(most, clock + forwards * forward + freeing + self.round_trip[rank])
        return most

    def _ticks_to_free(self, rank: int, halves: int) -> int:
        """The least time in which B and W free this many halves, where each W follows a B."""
        backward, weight = self.costs.backward[rank], self.costs.weight[rank]
        if halves <= 0:
            return 0
        if backward < weight:
            return halves * backward
        backwards = max(0, halves - self.pending[rank] + 1) // 2
        return backwards * backward + (halves - backwards) * weight


class Run:
    """A run of a heuristic, whose `steps` yield lower bounds of its pipeline's `longest`."""

    def __init__(self, pipeline: Pipeline, steps: Callable[[Pipeline], Iterator[int]]) -> None:
        self.pipeline, self.bound, self.is_done = pipeline, 0, False
        self._steps = steps(pipeline)

    def advance(self) -> None:
        bound = next(self._steps, None)
        if bound is None:
            self.is_done = True
        else:
            self.bound = bound


def greedy_candidates(begin: Callable[[], Pipeline], *, extra_warm_up: bool) -> Iterator[Candidate[Pipeline]]:
    """Candidates without and with each of the other two options. As long as an option has changed nothing, the runs
    with and without it are one."""
    options = (GreedyOptions(extra_warm_up, *each) for each in product((False, True), repeat=2))
    neither, eager, hold, both = (Run(begin(), partial(run_greedy, options=each)) for each in options)

    def with_hold() -> Run:
        return hold if both.pipeline.eager_mattered else both

    def with_eager() -> Run:
        return eager if both.pipeline.hold_mattered else both

    def without() -> Run:
        if not with_eager().pipeline.eager_mattered:
            return with_eager()
        return neither if with_hold().pipeline.hold_mattered else with_hold()

    return map(followed, (without, with_eager, with_hold, lambda: both))


def followed(run: Callable[[], Run]) -> Candidate[Pipeline]:
    """Follows `run()`, which may switch to another run on the way, to its end."""
    while not run().is_done:
        run().advance()
        yield run().bound
    return run().pipeline


def run_greedy(pipeline: Pipeline, options: GreedyOptions) -> Iterator[int]:
    """Runs a whole step; yields lower bounds of `longest`."""
    warm_up(pipeline, extra_warm_up=options.extra_warm_up)
    for number in range(1, pipeline.microbatches):
        if number % ROUNDS == 0:
            yield pipeline.least_longest()
        _forward_round(pipeline, options)
        _backward_round(pipeline, options.eager_weight)
    for rank in range(pipeline.ranks):
        pipeline.run_weights(rank, pipeline.pending[rank])


def warm_up(pipeline: Pipeline, *, extra_warm_up: bool) -> Pipeline:
    """Runs every rank up to its first backward, with forwards until its gradient arrives."""
    for rank in range(pipeline.ranks):
        pipeline.run_forward(rank)
    for rank, more in enumerate(_more_warm_up_forwards(pipeline, extra_warm_up)):
        for _ in range(more):
            pipeline.run_forward(rank)
    for rank in reversed(range(pipeline.ranks)):
        pipeline.run_backward(rank)
    return pipeline


def _more_warm_up_forwards(pipeline: Pipeline, extra_warm_up: bool) -> list[int]:
    """By rank: the number of warm-up forwards after the first one."""
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
            pipeline.run_forward(rank)


def _backward_round(pipeline: Pipeline, eager_weight: bool) -> None:
    """One backward per rank, from the last rank to the first."""
    for rank in reversed(range(pipeline.ranks)):
        _fill_gap(pipeline, rank, pipeline.next_gradient(rank), eager_weight)
        if rank == 0 and len(pipeline.forward_ends[rank]) == pipeline.microbatches:  # nothing waits for its backwards
            pipeline.run_weights(rank, pipeline.pending[rank])
        pipeline.run_backward(rank)


def _fill_gap(pipeline: Pipeline, rank: int, until: int, eager_weight: bool) -> None:
    """Runs weight gradients in the gap before `until`; the last one may end later."""
    pending, gap = pipeline.pending[rank], until - pipeline.clock[rank]
    if not pending or gap < 0:
        return
    weight = pipeline.costs.weight[rank]
    fitting = min(pending, gap // weight) if weight else pending
    pipeline.run_weights(rank, fitting)
    gap -= fitting * weight
    if fitting == pending or gap <= 0:
        return
    if gap > pipeline.idle_allowance(rank):
        pipeline.run_weights(rank, 1)
    elif eager_weight:
        pipeline.eager_mattered = True
        pipeline.run_weights(rank, 1)


def _runs_forward(pipeline: Pipeline, rank: int, hold_forward: bool) -> bool:
    done = len(pipeline.forward_ends[rank])
    weights = pipeline.weights_before_forward(rank)
    if done == pipeline.microbatches or weights > pipeline.pending[rank]:
        return False
    if hold_forward and _holds(pipeline, rank, weights):
        pipeline.hold_mattered = True
        return False
    return True


def _holds(pipeline: Pipeline, rank: int, weights: int) -> bool:
    """Whether the next rank already has the input of its next forward, and the gradient that follows is worth waiting
    for."""
    after = rank + 1
    if after == pipeline.ranks or len(pipeline.forward_ends[rank]) < len(pipeline.forward_ends[after]) + 2:
        return False
    costs = pipeline.costs
    gradient = pipeline.clock[after] + costs.forward[after] + costs.backward[after] + costs.backward_hop[rank]
    gap = gradient - pipeline.clock[rank]
    if gap <= 0:
        return True
    fits = costs.forward[rank] + max(weights, 0) * costs.weight[rank] <= gap
    return not fits and gap <= pipeline.idle_allowance(rank)
