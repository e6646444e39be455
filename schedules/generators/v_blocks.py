"""V-Half and V-Min: ZB-V's placement with about half and a third of 1F1B's activations, the same on every rank.

Qi et al. 2024, arXiv 2405.15362: a building block, the time slots of one microbatch, is repeated every six slots; how
long the block keeps a microbatch on a rank determines the memory. Only the order of the repeated blocks is used here.
Each rank follows it at the true costs: W fills gaps, and what has arrived may overtake what has not, as long as that
saves no more activations.
"""

from __future__ import annotations

from collections import deque
from enum import IntEnum
from heapq import heappop, heappush
from itertools import product
from math import inf
from typing import NamedTuple

import numpy as np

from pentad.schedules.generators.arrays import occurrence_index, streams_from_arrays
from pentad.schedules.generators.best_of import Candidate, best_of
from pentad.schedules.ir.columns import CODE, Array, Columns
from pentad.schedules.ir.instruction import Instruction, Op
from pentad.schedules.simulate.costs import Costs
from pentad.schedules.spec.schedule_spec import ScheduleSpec

PERIOD = 6  # slots: F, B and W of two chunks


class Leg(IntEnum):
    """One of the four passes of a microbatch through all ranks, or the next weight gradient due on a rank."""

    F_DOWN = 0
    F_UP = 1
    B_DOWN = 2
    B_UP = 3
    W = -1  # also the last index of an array by leg


PATH = (Leg.F_DOWN, Leg.F_UP, Leg.B_DOWN, Leg.B_UP)
FORWARDS, BACKWARDS = PATH[:2], PATH[2:]
UPWARDS = (Leg.F_UP, Leg.B_UP)
OPS = (Op.F, Op.F, Op.B, Op.B, Op.W)  # by leg
W, FIRST_BACKWARD, LAST = int(Leg.W), int(Leg.B_DOWN), int(Leg.B_UP)
EVENTS = 32  # per rank between two bounds
ROUNDING = 1e-9  # by which equal sums may differ, relative to the largest cost or to a step


class Block(NamedTuple):
    """Slots from rank to rank on the two legs `down` and the two legs `up`, and idle slots at the `turns` between."""

    down: int
    up: int
    turns: tuple[int, int, int]


class Policy(NamedTuple):
    """How a rank fills the gap before the next leg of its order: whether later legs may `overtake`, and up to what
    fraction of the filler's time it prefers to wait."""

    overtake: bool
    patience: float


IN_PLACE = Policy(False, inf)  # no gap is filled, W runs where the block has it: the order of the paper
# No policy is best for all costs: all are tried, and the shortest step wins.
FILLING = (Policy(False, 0.5), Policy(True, 0.0), Policy(True, 0.5), Policy(True, 1.0))


def v_half(spec: ScheduleSpec) -> Columns:
    """Saves at most `(ranks + 2) // 2` microbatches per rank, each until its W. At equal costs and from 3 ranks on, the
    busiest rank idles for (3 ranks - 7) / 2 times its F, or 1.5 more if the number of ranks is odd; that of 1F1B for 3
    ranks - 3."""
    is_even = spec.ranks % 2 == 0
    return _shortest(spec, [Block(2, 1, (0, 3 if is_even else 0, 1))], most_saved_by_v_half(spec))


def most_saved_by_v_half(spec: ScheduleSpec) -> int:
    """The most that a rank of `v_half` saves, in microbatches."""
    return (spec.ranks + 2) // 2


def v_min(spec: ScheduleSpec) -> Columns:
    """Saves at most `(ranks + 4) // 3` microbatches per rank, each until its W. At equal costs and from 2 ranks on, the
    busiest rank idles for at most (4 ranks - 5) / 2 times its F."""
    # The first two are the paper's (the second for multiples of 3 ranks); the third has slack at every turn, for where
    # rounding up leaves memory for it.
    blocks = [Block(1, 1, turns) for turns in ((0, 0, 0), (0, 2, 0), (2, 2, 2))]
    return _shortest(spec, blocks, most_saved_by_v_min(spec))


def most_saved_by_v_min(spec: ScheduleSpec) -> int:
    """The most that a rank of `v_min` saves, in microbatches."""
    return (spec.ranks + 4) // 3


def _shortest(spec: ScheduleSpec, blocks: list[Block], max_saved: int) -> Columns:
    """The shortest step, by its busiest rank and then by its makespan, that saves at most `max_saved` microbatches."""
    costs = spec.costs or Costs.uniform(2 * spec.ranks, chunks=2)
    tried = (
        (policies, [_block_order(block, rank, spec, in_place=policies == (IN_PLACE,)) for rank in range(spec.ranks)])
        for block, policies in product(blocks, ((IN_PLACE,), FILLING))
    )
    fitting = [(policies, orders) for policies, orders in tried if max(map(_peak, orders)) <= 2 * max_saved]
    steps = (_run(orders, policy, spec, costs, 2 * max_saved) for policies, orders in fitting for policy in policies)
    most = spec.microbatches * 2 * max(map(sum, zip(costs.forward, costs.backward, costs.weight, strict=True)))
    return _streams(best_of(steps, _durations, ROUNDING * most), spec.microbatches)


def _block_order(block: Block, rank: int, spec: ScheduleSpec, *, in_place: bool) -> Array:
    """The legs of a rank in the order of the repeated blocks; each W in the first free slot after its B if `in_place`,
    else left out."""
    start, repeats = 0, PERIOD * np.arange(spec.microbatches)  # the slot in which the first microbatch starts a leg
    slots: list[Array] = []  # by leg
    for leg, turn in zip(PATH, (*block.turns, 0), strict=True):
        hop, hops = (block.up, spec.ranks - 1 - rank) if leg in UPWARDS else (block.down, rank)
        slots.append(start + hop * hops + repeats)
        start += hop * (spec.ranks - 1) + 1 + turn
    legs = np.repeat(PATH, spec.microbatches)
    if in_place:
        legs = np.concatenate((legs, np.full(2 * spec.microbatches, Leg.W)))
        slots.append(_free_after(np.sort(np.concatenate(slots[Leg.B_DOWN :])), np.concatenate(slots)))
    return legs[np.lexsort((legs, np.concatenate(slots)))]


def _free_after(backwards: Array, taken: Array) -> Array:
    """For each of these ascending slots the next free one; no two get the same."""
    free, found, others = 0, list[int](), set(taken.tolist())
    for slot in backwards.tolist():
        free = max(free, slot) + 1
        while free in others:
            free += 1
        found.append(free)
    return np.array(found)


def _peak(order: Array) -> int:
    """The most chunks saved at once; if the order has no W, each is assumed to run right after its B."""
    is_weight, is_forward = order == Leg.W, (order == Leg.F_DOWN) | (order == Leg.F_UP)
    frees = is_weight if is_weight.any() else ~is_forward
    return int((is_forward.astype(int) - frees).cumsum().max())


class _Rank:
    """What a rank still has to run, and what it has run. Legs are plain numbers here, the fastest to compare."""

    def __init__(self, rank: int, ranks: int, order: Array, costs: Costs, policy: Policy, max_saved: int) -> None:
        low, high = rank, 2 * ranks - 1 - rank
        self.order: list[int] = order.tolist()  # legs still to run
        self.policy, self.max_saved = policy, max_saved
        self.next_input = [inf for _ in PATH]  # by leg: when its next input arrives
        self.later_inputs: list[deque[float]] = [deque() for _ in PATH]  # the inputs after that
        self.stages = (low, high, high, low)
        self.seconds = [costs.seconds_on(rank, Instruction(OPS[leg], self.stages[leg])) for leg in PATH]
        self.weight_seconds = [costs.seconds_on(rank, Instruction(Op.W, stage)) for stage in self.stages]
        self.next_leg = [_next_leg(rank, leg, ranks, costs) for leg in PATH]
        microbatches = len(order[order == LAST])
        self.left = microbatches * sum(self.seconds)  # seconds of its forwards and backwards still to run
        self.work = self.left + microbatches * sum(self.weight_seconds[leg] for leg in BACKWARDS)  # seconds in all
        self.pending: deque[int] = deque()  # backwards whose W is still to run
        self.saved = 0  # chunks between F and the end of W
        self.begin = self.end = self.idle = 0.0  # idle: since it began
        self.done: list[int] = []

    def arrive(self, leg: int, time: float) -> None:
        if self.next_input[leg] < inf:
            self.later_inputs[leg].append(time)
        else:
            self.next_input[leg] = time

    def choose(self, now: float) -> int | None:
        """What to start: an index of `order`, W, or None to wait."""
        policy, fits, arrival = self.policy, False, inf
        if self.order:
            leg = self.order[0]
            if leg == W:
                return W
            fits = leg >= FIRST_BACKWARD or self.saved < self.max_saved
            arrival = self.next_input[leg]
            if arrival <= now:
                return 0 if fits else W
        if policy is IN_PLACE:
            return None
        filler = self._overtaking(now) if policy.overtake else None
        if filler is not None:
            seconds = self.seconds[self.order[filler]]
        elif self.pending:
            filler, seconds = W, self.weight_seconds[self.pending[0]]
        else:
            return None
        return None if fits and arrival - now < policy.patience * seconds else filler

    def _overtaking(self, now: float) -> int | None:
        """Index of the first leg that has arrived and, if it is a forward, leaves enough memory for everything that it
        overtakes once all pending W have run: a rank never blocks itself, and the block's order stays feasible."""
        if min(self.next_input) > now:
            return None
        arrived = [time <= now for time in self.next_input]
        saved_after_weights, peak, max_saved = self.saved - len(self.pending), self.saved, self.max_saved
        for index, leg in enumerate(self.order):
            if arrived[leg]:
                if leg >= FIRST_BACKWARD or peak < max_saved:
                    return index
                arrived[leg] = False
                if True not in arrived:
                    break
            if leg >= FIRST_BACKWARD:
                saved_after_weights -= 1
            else:
                saved_after_weights += 1
                if saved_after_weights > peak:
                    peak = saved_after_weights
        return None

    def start(self, choice: int, now: float) -> int:
        """Runs the choice and returns its leg."""
        start, done = self.end, self.done
        if now > start:
            if done:
                self.idle += now - start
            start = now
        if not done:
            self.begin = now
        if choice == W:
            if self.order and self.order[0] == W:
                del self.order[0]
            self.saved -= 1
            self.end = start + self.weight_seconds[self.pending.popleft()]
            done.append(W)
            return W
        leg = self.order.pop(choice)
        later = self.later_inputs[leg]
        self.next_input[leg] = later.popleft() if later else inf
        seconds = self.seconds[leg]
        self.end = start + seconds
        self.left -= seconds
        done.append(leg)
        if leg >= FIRST_BACKWARD:
            self.pending.append(leg)
        else:
            self.saved += 1
        return leg


def _run(
    orders: list[Array], policy: Policy, spec: ScheduleSpec, costs: Costs, max_saved: int
) -> Candidate[list[_Rank]]:
    """Runs a step that saves at most `max_saved` chunks per rank. Yields lower bounds of its busiest rank's time;
    returns all ranks."""
    ranks = [_Rank(rank, spec.ranks, order, costs, policy, max_saved) for rank, order in enumerate(orders)]
    for _ in range(spec.microbatches):
        ranks[0].arrive(Leg.F_DOWN, 0.0)
    events = [(0.0, 0)]  # when a rank may have something to start
    rounding = ROUNDING * max(*costs.forward, *costs.backward, *costs.weight)  # by which equal sums may differ
    left = every = EVENTS * spec.ranks
    while events:
        now, at = heappop(events)
        rank = ranks[at]
        now_or_so = now + rounding
        if now_or_so < rank.end:
            continue
        choice = rank.choose(now_or_so)
        if choice is None:
            continue
        leg = rank.start(choice, now)
        end = rank.end
        heappush(events, (end, at))
        if leg == W or (leg == LAST and at == 0):
            continue
        target, leg, transfer = rank.next_leg[leg]
        arrival = end + transfer
        ranks[target].arrive(leg, arrival)
        if arrival + rounding >= ranks[target].end:  # else the rank looks again when it is free
            heappush(events, (arrival, target))
        left -= 1
        if not left:
            left = every
            yield _least_longest(ranks)
    return ranks


def _least_longest(ranks: list[_Rank]) -> float:
    """A lower bound of the busiest rank's time: each rank's work plus its idle time so far; and, as rank 0 starts at 0,
    the time until the last microbatch's gradient has come back to it from each rank."""
    way, most = ranks[0].weight_seconds[LAST], 0.0
    for rank in ranks:
        most = max(most, rank.work + rank.idle, rank.end + rank.left + way if rank.order else 0.0)
        way += rank.seconds[LAST] + rank.next_leg[LAST][2]
    return most


def _next_leg(rank: int, leg: Leg, ranks: int, costs: Costs) -> tuple[int, Leg, float]:
    """Where a microbatch goes after a leg on a rank, and the seconds it takes: to the next rank or, at the end of the
    pipeline, to the same rank's next leg."""
    target = rank + (-1 if leg in UPWARDS else 1)
    if 0 <= target < ranks:
        return target, leg, costs.hop(rank, target)
    return rank, PATH[(leg + 1) % len(PATH)], 0.0


def _streams(ranks: list[_Rank], microbatches: int) -> Columns:
    """What the ranks have run: the microbatches of each leg in ascending order, W in the order of B."""
    legs = np.array([rank.done for rank in ranks])
    mb = occurrence_index(legs, microbatches)
    stage = np.take_along_axis(np.array([rank.stages for rank in ranks]), legs, axis=1)
    is_weight, is_backward = legs == Leg.W, legs >= Leg.B_DOWN
    for column in (mb, stage):
        column[is_weight] = column[is_backward]  # each row has equally many of both
    return streams_from_arrays(np.array([CODE[op] for op in OPS])[legs], stage, mb)


def _durations(ranks: list[_Rank]) -> tuple[float, float]:
    """Longest (busiest rank from first start to last end) and makespan."""
    return max(rank.end - rank.begin for rank in ranks), max(rank.end for rank in ranks)
