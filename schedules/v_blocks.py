"""V-Half and V-Min: ZB-V's placement with about half and a third of 1F1B's activations, the same on every rank.

Qi et al. 2024, arXiv 2405.15362: a building block, the slots of one microbatch, is repeated every six slots; how long
it keeps a microbatch on a rank fixes the memory. Only the order of the blocks is taken over. Each rank follows it by
the true costs: W fill gaps, and what is there may overtake what is late, where no activation more is kept for it.
"""

from __future__ import annotations

from collections import deque
from heapq import heappop, heappush
from itertools import accumulate, count, product
from math import inf
from typing import NamedTuple

from pentad.schedules.costs import Costs
from pentad.schedules.instruction import Instruction, Op, Unit
from pentad.schedules.shape import Shape

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
RULES = (IN_PLACE, Rule(False, 0.5), Rule(True, 0.0), Rule(True, 0.5), Rule(True, 1.0))


def v_half(shape: Shape) -> tuple[tuple[Unit, ...], ...]:
    """Keeps at most `(ranks + 2) // 2` microbatches a rank, each until its W. At equal costs and from 3 ranks on, the
    busiest rank idles for (3 ranks - 7) / 2 times its F, 1.5 more if ranks are odd; that of 1F1B for 3 ranks - 3."""
    even = shape.ranks % 2 == 0
    return _shortest(shape, [Block(2, 1, (0, 3 if even else 0, 1))], (shape.ranks + 2) // 2)


def v_min(shape: Shape) -> tuple[tuple[Unit, ...], ...]:
    """Keeps at most `(ranks + 4) // 3` microbatches a rank, each until its W. At equal costs and from 2 ranks on, the
    busiest rank idles for at most (4 ranks - 5) / 2 times its F."""
    # The first two are the paper's (the second where ranks are a multiple of 3); the third has slack at every turn,
    # and fits where rounding up leaves memory for it.
    blocks = [Block(1, 1, turns) for turns in ((0, 0, 0), (0, 2, 0), (2, 2, 2))]
    return _shortest(shape, blocks, (shape.ranks + 4) // 3)


def _shortest(shape: Shape, blocks: list[Block], keep: int) -> tuple[tuple[Unit, ...], ...]:
    """The shortest step, by its busiest rank and then from end to end, that keeps at most `keep` microbatches."""
    costs = shape.costs or Costs.uniform(2 * shape.ranks, chunks=2)
    tried = (
        (rule, [_order(block, rank, shape, rule) for rank in range(shape.ranks)])
        for block, rule in product(blocks, RULES)
    )
    fitting = ((rule, orders) for rule, orders in tried if max(map(_peak, orders)) <= 2 * keep)
    done = (_run(orders, rule, shape, costs, 2 * keep) for rule, orders in fitting)
    best = min(done, key=_length)
    return tuple(tuple(Instruction(*key) for key in rank.stream) for rank in best)


def _order(block: Block, rank: int, shape: Shape, rule: Rule) -> list[int]:
    """Legs in the order in which a rank runs them, the blocks of all microbatches repeated; each W in the first free
    slot after its B if they run in place, else left out."""
    begin = 0
    places: list[tuple[int, int]] = []
    for leg, turn in enumerate((*block.turns, 0)):
        hop, hops = (block.up, shape.ranks - 1 - rank) if leg % 2 else (block.down, rank)
        places += [(begin + hop * hops + PERIOD * mb, leg) for mb in range(shape.microbatches)]
        begin += hop * (shape.ranks - 1) + 1 + turn
    if rule is IN_PLACE:
        free = 0
        taken = {slot for slot, _ in places}
        for slot in sorted(slot for slot, leg in places if leg > 1):
            free = next(k for k in count(max(free, slot) + 1) if k not in taken)
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
        self.order = order  # legs still to run
        self.there: tuple[deque[float], ...] = (deque(), deque(), deque(), deque())  # when each leg's inputs arrive
        self.stages = (low, high, high, low)
        self.seconds = [costs.on(rank, Instruction(op, stage)) for op, stage in zip(LEGS, self.stages, strict=True)]
        self.weight = {stage: costs.on(rank, Instruction(Op.W, stage)) for stage in (low, high)}
        self.given = [0, 0, 0, 0]
        self.due: deque[tuple[int, int]] = deque()  # (stage, microbatch) of which only W is left
        self.kept = 0  # chunks between F and the end of W
        self.begin, self.free = inf, 0.0
        self.stream: list[tuple[Op, int, int]] = []

    def choose(self, now: float, rule: Rule, keep: int) -> int:
        """A position in `order`, or WEIGHT or WAIT."""
        fits, arrival = False, inf
        if self.order:
            leg = self.order[0]
            if leg == WEIGHT:
                return WEIGHT
            fits = leg > 1 or self.kept < keep
            arrival = self.there[leg][0] if self.there[leg] else inf
            if arrival <= now:
                return 0 if fits else WEIGHT
        if rule is IN_PLACE:
            return WAIT
        filler = self._overtaking(now, keep) if rule.overtake else WAIT
        if filler != WAIT:
            seconds = self.seconds[self.order[filler]]
        elif self.due:
            filler, seconds = WEIGHT, self.weight[self.due[0][0]]
        else:
            return WAIT
        return WAIT if fits and arrival - now < rule.patience * seconds else filler

    def _overtaking(self, now: float, keep: int) -> int:
        """The first leg that is there and, if it is an F, leaves room for all that it overtakes, once every W that is
        due has run: so a rank never blocks itself, and the order of the block always remains a way to the end."""
        least = peak = self.kept - len(self.due)
        seen: set[int] = set()
        for at, leg in enumerate(self.order):
            if leg not in seen:
                seen.add(leg)
                arrived = self.there[leg] and self.there[leg][0] <= now
                if arrived and (leg > 1 or max(self.kept, peak) < keep):
                    return at
                if len(seen) == len(LEGS):
                    break
            least += 1 if leg < 2 else -1
            peak = max(peak, least)
        return WAIT

    def take(self, choice: int, now: float) -> int:
        """Runs the choice and returns its leg, or WEIGHT."""
        self.begin, start = min(self.begin, now), max(now, self.free)
        if choice == WEIGHT:
            if self.order and self.order[0] == WEIGHT:
                self.order.pop(0)
            stage, mb = self.due.popleft()
            self.kept -= 1
            self.free = start + self.weight[stage]
            self.stream.append((Op.W, stage, mb))
            return WEIGHT
        leg = self.order.pop(choice)
        self.there[leg].popleft()
        stage, mb = self.stages[leg], self.given[leg]
        self.given[leg] += 1
        self.free = start + self.seconds[leg]
        self.stream.append((LEGS[leg], stage, mb))
        if leg > 1:
            self.due.append((stage, mb))
        else:
            self.kept += 1
        return leg


def _run(orders: list[list[int]], rule: Rule, shape: Shape, costs: Costs, keep: int) -> list[_Rank]:
    """All ranks after their step, `keep` chunks kept at most."""
    ranks = [_Rank(rank, shape.ranks, order, costs) for rank, order in enumerate(orders)]
    ranks[0].there[0].extend([0.0] * shape.microbatches)
    events = [(0.0, 0)]  # when a rank may have something to start
    slack = 1e-9 * max(*costs.forward, *costs.backward, *costs.weight)  # sums of the same costs differ by rounding
    while events:
        now, at = heappop(events)
        rank = ranks[at]
        if now + slack < rank.free:
            continue
        choice = rank.choose(now + slack, rule, keep)
        if choice == WAIT:
            continue
        leg = rank.take(choice, now)
        heappush(events, (rank.free, at))
        if leg == WEIGHT or (leg == 3 and at == 0):
            continue
        # To the next rank of the leg or, at its end, to the same rank's next leg
        target = at + (-1 if leg % 2 else 1)
        target, leg = (target, leg) if 0 <= target < shape.ranks else (at, leg + 1)
        transfer = costs.hop(at, target)
        ranks[target].there[leg].append(rank.free + transfer)
        heappush(events, (rank.free + transfer, target))
    return ranks


def _length(ranks: list[_Rank]) -> tuple[float, float]:
    """Seconds of the busiest rank from its first start to its last end, and from the first start to the last end."""
    return max(rank.free - rank.begin for rank in ranks), max(rank.free for rank in ranks)
