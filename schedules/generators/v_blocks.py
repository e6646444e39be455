"""V-Half and V-Min: ZB-V's placement with about half and a third of 1F1B's activations, the same on every rank.

Qi et al. 2024, arXiv 2405.15362: a building block, the slots of one microbatch, is repeated every six slots; how long
it keeps a microbatch on a rank fixes the memory. Only the order of the blocks is taken over. Each rank follows it by
the true costs: W fill gaps, and what is there may overtake what is late, where no activation more is kept for it.
"""

from __future__ import annotations

from collections import deque
from heapq import heappop, heappush
from itertools import accumulate, product
from math import inf
from typing import NamedTuple

import numpy as np

from pentad.schedules.generators.orders import numbered, streams
from pentad.schedules.ir.columns import CODE
from pentad.schedules.ir.instruction import Instruction, Op
from pentad.schedules.ir.program import Streams
from pentad.schedules.simulate.costs import Costs
from pentad.schedules.spec.schedule_spec import ScheduleSpec

PERIOD = 6  # slots: F, B and W of two chunks
LEGS = (Op.F, Op.F, Op.B, Op.B)  # of a microbatch's way: down and up the V forward, down and up again backward
WEIGHT = -1  # in an order and as a choice: the next W that is due
WAIT = -2


class Block(NamedTuple):
    """Slots from rank to rank on the two ways `down` and the two ways `up`, and those lost at the `turns` between."""

    down: int
    up: int
    turns: tuple[int, int, int]


class Rule(NamedTuple):
    """How a rank fills the gap before what is next in its order: whether F and B may `overtake`, and for what share of
    the filler's time it rather waits."""

    overtake: bool
    patience: float


IN_PLACE = Rule(False, inf)  # no gap is filled, W runs where the block has it: the paper's squeezed order
# None is best at all costs: all are tried, and the shortest step is taken.
FILLING = (Rule(False, 0.5), Rule(True, 0.0), Rule(True, 0.5), Rule(True, 1.0))


def v_half(shape: ScheduleSpec) -> Streams:
    """Keeps at most `(ranks + 2) // 2` microbatches a rank, each until its W. At equal costs and from 3 ranks on, the
    busiest rank idles for (3 ranks - 7) / 2 times its F, 1.5 more if ranks are odd; that of 1F1B for 3 ranks - 3."""
    even = shape.ranks % 2 == 0
    return _shortest(shape, [Block(2, 1, (0, 3 if even else 0, 1))], (shape.ranks + 2) // 2)


def v_min(shape: ScheduleSpec) -> Streams:
    """Keeps at most `(ranks + 4) // 3` microbatches a rank, each until its W. At equal costs and from 2 ranks on, the
    busiest rank idles for at most (4 ranks - 5) / 2 times its F."""
    # The first two are the paper's (the second where ranks are a multiple of 3); the third has slack at every turn,
    # and fits where rounding up leaves memory for it.
    blocks = [Block(1, 1, turns) for turns in ((0, 0, 0), (0, 2, 0), (2, 2, 2))]
    return _shortest(shape, blocks, (shape.ranks + 4) // 3)


def _shortest(shape: ScheduleSpec, blocks: list[Block], keep: int) -> Streams:
    """The shortest step, by its busiest rank and then from end to end, that keeps at most `keep` microbatches."""
    costs = shape.costs or Costs.uniform(2 * shape.ranks, chunks=2)
    tried = (
        (rules, [_order(block, rank, shape, in_place=rules == (IN_PLACE,)) for rank in range(shape.ranks)])
        for block, rules in product(blocks, ((IN_PLACE,), FILLING))
    )
    fitting = ((rules, orders) for rules, orders in tried if max(map(_peak, orders)) <= 2 * keep)
    done = (_run(orders, rule, shape, costs, 2 * keep) for rules, orders in fitting for rule in rules)
    best = min(done, key=_length)
    return _streams(best, shape.microbatches)


def _order(block: Block, rank: int, shape: ScheduleSpec, *, in_place: bool) -> list[int]:
    """Legs in the order in which a rank runs them, the blocks of all microbatches repeated; each W in the first free
    slot after its B if they run `in_place`, else left out."""
    begin = 0
    places: list[tuple[int, int]] = []
    for leg, turn in enumerate((*block.turns, 0)):
        hop, hops = (block.up, shape.ranks - 1 - rank) if leg % 2 else (block.down, rank)
        first = begin + hop * hops
        places += [(slot, leg) for slot in range(first, first + PERIOD * shape.microbatches, PERIOD)]
        begin += hop * (shape.ranks - 1) + 1 + turn
    if in_place:
        free = 0
        taken = {slot for slot, _ in places}
        for slot in sorted(slot for slot, leg in places if leg > 1):
            free = max(free, slot) + 1
            while free in taken:
                free += 1
            places.append((free, WEIGHT))
    return [leg for _, leg in sorted(places)]


def _peak(order: list[int]) -> int:
    """Most chunks kept; where W are left out, each is taken to follow its B at once."""
    frees = (WEIGHT,) if WEIGHT in order else (2, 3)
    return max(accumulate((leg in (0, 1)) - (leg in frees) for leg in order))


class _Rank:
    """What a rank has before it, and what it has done."""

    def __init__(self, rank: int, ranks: int, order: list[int], costs: Costs) -> None:
        low, high = rank, 2 * ranks - 1 - rank
        self.order = order.copy()  # legs still to run
        self.first = [inf for _ in LEGS]  # when each leg's next inputs arrive
        self.later: list[deque[float]] = [deque() for _ in LEGS]  # ... and those behind them
        self.stages = (low, high, high, low)
        self.seconds = [costs.on(rank, Instruction(op, stage)) for op, stage in zip(LEGS, self.stages, strict=True)]
        self.weight = [costs.on(rank, Instruction(Op.W, stage)) for stage in self.stages]
        self.next = [_next(rank, leg, ranks, costs) for leg in range(len(LEGS))]
        self.due: deque[int] = deque()  # legs of which only W is left
        self.kept = 0  # chunks between F and the end of W
        self.begin = self.free = 0.0
        self.done: list[int] = []  # legs, and WEIGHT

    def arrive(self, leg: int, time: float) -> None:
        if self.first[leg] < inf:
            self.later[leg].append(time)
        else:
            self.first[leg] = time

    def choose(self, now: float, rule: Rule, keep: int) -> int:
        """A position in `order`, or WEIGHT or WAIT."""
        fits, arrival = False, inf
        if self.order:
            leg = self.order[0]
            if leg == WEIGHT:
                return WEIGHT
            fits = leg > 1 or self.kept < keep
            arrival = self.first[leg]
            if arrival <= now:
                return 0 if fits else WEIGHT
        if rule is IN_PLACE:
            return WAIT
        filler = self._overtaking(now, keep) if rule.overtake else WAIT
        if filler != WAIT:
            seconds = self.seconds[self.order[filler]]
        elif self.due:
            filler, seconds = WEIGHT, self.weight[self.due[0]]
        else:
            return WAIT
        return WAIT if fits and arrival - now < rule.patience * seconds else filler

    def _overtaking(self, now: float, keep: int) -> int:
        """The first leg that is there and, if it is an F, leaves room for all that it overtakes, once every W that is
        due has run: so a rank never blocks itself, and the order of the block always remains a way to the end."""
        if min(self.first) > now:
            return WAIT
        arrived = [time <= now for time in self.first]
        least, peak = self.kept - len(self.due), self.kept
        for at, leg in enumerate(self.order):
            if arrived[leg]:
                if leg > 1 or peak < keep:
                    return at
                arrived[leg] = False
                if True not in arrived:
                    break
            least += 1 if leg < 2 else -1
            peak = max(peak, least)
        return WAIT

    def take(self, choice: int, now: float) -> int:
        """Runs the choice and returns its leg, or WEIGHT."""
        start = now if now > self.free else self.free
        if not self.done:
            self.begin = now
        if choice == WEIGHT:
            if self.order and self.order[0] == WEIGHT:
                del self.order[0]
            self.kept -= 1
            self.free = start + self.weight[self.due.popleft()]
            self.done.append(WEIGHT)
            return WEIGHT
        leg = self.order.pop(choice)
        self.first[leg] = self.later[leg].popleft() if self.later[leg] else inf
        self.free = start + self.seconds[leg]
        self.done.append(leg)
        if leg > 1:
            self.due.append(leg)
        else:
            self.kept += 1
        return leg


def _run(orders: list[list[int]], rule: Rule, shape: ScheduleSpec, costs: Costs, keep: int) -> list[_Rank]:
    """All ranks after their step, `keep` chunks kept at most."""
    ranks = [_Rank(rank, shape.ranks, order, costs) for rank, order in enumerate(orders)]
    for _ in range(shape.microbatches):
        ranks[0].arrive(0, 0.0)
    events = [(0.0, 0)]  # when a rank may have something to start
    slack = 1e-9 * max(*costs.forward, *costs.backward, *costs.weight)  # sums of the same costs differ by rounding
    while events:
        now, at = heappop(events)
        rank = ranks[at]
        late = now + slack
        if late < rank.free:
            continue
        choice = rank.choose(late, rule, keep)
        if choice == WAIT:
            continue
        leg = rank.take(choice, now)
        heappush(events, (rank.free, at))
        if leg == WEIGHT or (leg == 3 and at == 0):
            continue
        target, leg, transfer = rank.next[leg]
        arrival = rank.free + transfer
        ranks[target].arrive(leg, arrival)
        if arrival + slack >= ranks[target].free:  # else it looks when it is free
            heappush(events, (arrival, target))
    return ranks


def _next(rank: int, leg: int, ranks: int, costs: Costs) -> tuple[int, int, float]:
    """Where a microbatch goes behind a leg on a rank: the next rank or, at the end of the leg, the same rank's next
    leg; and how long that takes."""
    target = rank + (-1 if leg % 2 else 1)
    return (target, leg, costs.hop(rank, target)) if 0 <= target < ranks else (rank, leg + 1, 0.0)


def _streams(ranks: list[_Rank], microbatches: int) -> Streams:
    """What they have done: of each leg one microbatch after the other, and W in the order of B."""
    legs = np.array([rank.done for rank in ranks])
    mb = numbered(legs, microbatches)
    stage = np.take_along_axis(np.array([rank.stages for rank in ranks]), legs, axis=1)
    weights = legs == WEIGHT
    for column in (mb, stage):
        column[weights] = column[legs > 1]  # rank after rank as many
    return streams(np.array([CODE[op] for op in (*LEGS, Op.W)])[legs], stage, mb)  # WEIGHT is the last


def _length(ranks: list[_Rank]) -> tuple[float, float]:
    """Seconds of the busiest rank from its first start to its last end, and from the first start to the last end."""
    return max(rank.free - rank.begin for rank in ranks), max(rank.free for rank in ranks)
