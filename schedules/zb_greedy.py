"""The greedy of the automatic zero-bubble scheduler: one order for one setting of its three knobs.

Qi et al. 2023, arXiv 2401.10241, section 3.1 and appendix: forwards fill the warm-up; then come rounds of at most one
forward and one backward a rank, with weight gradients in the gaps or where memory runs out; what is left follows.
"""

from __future__ import annotations

from math import ceil, floor, log10
from typing import NamedTuple

from pentad.schedules.costs import Costs
from pentad.schedules.instruction import Instruction, Op

DIGITS = 12  # of the dearest operation's cost that are told apart
NEVER = 1 << 100  # ticks


class Knobs(NamedTuple):
    """`late`: a last warm-up forward may delay the first backward. `backward`: hold a forward back where the next rank
    is two forwards behind. `eager`: a weight gradient may delay what it precedes even on the rank that idles most.
    """

    late: bool
    backward: bool
    eager: bool


class Line:
    """The ranks of a pipeline, one stage each, as they run one operation after the other, as early as inputs allow.

    Times are whole ticks, so that sums that are equal compare equal.
    """

    def __init__(self, costs: Costs, ranks: int, microbatches: int) -> None:
        self.ranks, self.microbatches = ranks, microbatches
        tick = 10.0 ** (floor(log10(max(costs.forward + costs.backward + costs.weight))) - DIGITS)

        def ticks(op: Op, on: range, step: int = 0) -> list[int]:
            return [round(costs.on(rank, Instruction(op, rank, peer=rank + step)) / tick) for rank in on]

        self.forward, self.backward, self.weight = (ticks(op, range(ranks)) for op in (Op.F, Op.B, Op.W))
        self.hops_f = [0, *ticks(Op.SEND_F, range(ranks - 1), 1)]  # by the rank that receives
        self.hops_b = [*ticks(Op.SEND_B, range(1, ranks), -1), 0]
        self.streams: list[list[Op]] = [[] for _ in range(ranks)]
        self.clock = [0] * ranks
        self.idle = [0] * ranks  # since the rank's first forward
        # Ends by rank and microbatch, and whose ends the inputs are; at either end of the line they are there at once
        self.forwards: list[list[int]] = [[] for _ in range(ranks)]
        self.backwards: list[list[int]] = [[] for _ in range(ranks)]
        self.weights: list[list[int]] = [[] for _ in range(ranks)]
        given = [0] * microbatches
        self.activations = [given, *self.forwards[:-1]]
        self.gradients = [*self.backwards[1:], given]

    def arrival(self, rank: int, op: Op) -> int:
        """When the input of a rank's next F or B is there; NEVER while nothing has made it."""
        if op is Op.F:
            made, mb, hop = self.activations[rank], len(self.forwards[rank]), self.hops_f[rank]
        else:
            made, mb, hop = self.gradients[rank], len(self.backwards[rank]), self.hops_b[rank]
            if mb == len(self.forwards[rank]):
                return NEVER
        return made[mb] + hop if mb < len(made) else NEVER

    def run(self, rank: int, op: Op) -> None:
        if op is Op.W:
            arrival, cost, ends = 0, self.weight[rank], self.weights[rank]
        elif op is Op.F:
            arrival, cost, ends = self.arrival(rank, op), self.forward[rank], self.forwards[rank]
        else:
            arrival, cost, ends = self.arrival(rank, op), self.backward[rank], self.backwards[rank]
        wait = max(arrival - self.clock[rank], 0)
        if self.streams[rank]:
            self.idle[rank] += wait
        self.clock[rank] += wait + cost
        self.streams[rank].append(op)
        ends.append(self.clock[rank])

    def pending(self, rank: int) -> int:
        """Weight gradients that could run now."""
        return len(self.backwards[rank]) - len(self.weights[rank])

    def excess(self, rank: int, limit: float) -> int:
        """Weight gradients that must run before one more forward keeps to the limit; each frees half a microbatch."""
        ahead = len(self.forwards[rank]) - len(self.backwards[rank])
        return max(ceil(2 * (ahead + 1 - limit)) + self.pending(rank), 0)

    def slack(self, rank: int) -> int:
        """How much more a rank may idle before it idles most of all."""
        return max(self.idle) - self.idle[rank]

    def spans(self) -> tuple[int, int]:
        """Longest and makespan."""
        starts = [ends[0] - cost for ends, cost in zip(self.forwards, self.forward, strict=True)]
        return max(end - start for end, start in zip(self.clock, starts, strict=True)), max(self.clock)


def greedy(line: Line, limit: float, knobs: Knobs) -> Line:
    """Runs a whole step. `limit` is in microbatches of activations, from 1 to `microbatches`."""
    _warm_up(line, limit, knobs.late)
    for _ in range(1, line.microbatches):
        _forwards(line, limit, knobs)
        _backwards(line, knobs.eager)
    for rank in range(line.ranks):
        for _ in range(line.pending(rank)):
            line.run(rank, Op.W)
    return line


def _warm_up(line: Line, limit: float, late: bool) -> None:
    """Up to the first backward of every rank: forwards in the time that its gradient takes to come."""
    for rank in range(line.ranks):
        line.run(rank, Op.F)
    extra = [0] * line.ranks
    gradient = 0  # when the next rank has made it
    for rank in reversed(range(line.ranks)):
        clock, gradient = line.clock[rank], gradient + line.hops_b[rank]
        while rank + 1 < line.ranks and 1 + extra[rank] < line.microbatches and 2 + extra[rank] <= limit:
            if gradient <= clock if late else gradient < clock + line.forward[rank]:
                break
            clock += line.forward[rank]
            extra[rank] += 1
        gradient = max(clock, gradient) + line.backward[rank]
    for rank in range(1, line.ranks):  # one less than the rank before has, as its forwards come that much later
        through = 1 + extra[rank - 1] == line.microbatches
        extra[rank] = min(extra[rank], extra[rank - 1] if through else max(extra[rank - 1] - 1, 0))
    for rank in range(line.ranks):
        for _ in range(extra[rank]):
            line.run(rank, Op.F)
    for rank in reversed(range(line.ranks)):
        line.run(rank, Op.B)


def _forwards(line: Line, limit: float, knobs: Knobs) -> None:
    """At most one forward a rank; where a rank has none, those before it have none."""
    wanted = [_wants_forward(line, rank, limit, knobs.backward) for rank in range(line.ranks)]
    for rank in reversed(range(line.ranks - 1)):
        wanted[rank] = wanted[rank] and wanted[rank + 1]
    for rank in range(line.ranks):
        if wanted[rank]:
            for _ in range(line.excess(rank, limit)):
                line.run(rank, Op.W)
            _fill(line, rank, line.arrival(rank, Op.F), knobs.eager)
            line.run(rank, Op.F)


def _backwards(line: Line, eager: bool) -> None:
    """One backward a rank, from the last rank to the first."""
    for rank in reversed(range(line.ranks)):
        _fill(line, rank, line.arrival(rank, Op.B), eager)
        if rank == 0 and len(line.forwards[rank]) == line.microbatches:  # nothing waits for its backwards
            for _ in range(line.pending(rank)):
                line.run(rank, Op.W)
        line.run(rank, Op.B)


def _fill(line: Line, rank: int, until: int, eager: bool) -> None:
    """Weight gradients into the gap before `until`; the last one may delay what comes then."""
    while line.pending(rank) and line.clock[rank] + line.weight[rank] <= until:
        line.run(rank, Op.W)
    gap = until - line.clock[rank]
    if line.pending(rank) and gap > 0 and (eager or gap > line.slack(rank)):
        line.run(rank, Op.W)


def _wants_forward(line: Line, rank: int, limit: float, backward: bool) -> bool:
    done = len(line.forwards[rank])
    excess = line.excess(rank, limit)
    if done == line.microbatches or excess > line.pending(rank):
        return False
    if not backward or rank + 1 == line.ranks or done < len(line.forwards[rank + 1]) + 2:
        return True
    # The next rank has a forward in stock: is the gradient that it sends after that forward worth waiting for?
    after = rank + 1
    gradient = line.clock[after] + line.forward[after] + line.backward[after] + line.hops_b[rank]
    gap = gradient - line.clock[rank]
    if gap <= 0:
        return False
    return line.forward[rank] + excess * line.weight[rank] <= gap or gap > line.slack(rank)
