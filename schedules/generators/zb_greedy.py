"""The greedy of the automatic zero-bubble scheduler: one order for one setting of its three knobs.

Qi et al. 2023, arXiv 2401.10241, section 3.1 and appendix: forwards fill the warm-up; then come rounds of at most one
forward and one backward a rank, with weight gradients in the gaps or where memory runs out; what is left follows.
"""

from __future__ import annotations

from math import floor, log10
from typing import NamedTuple

from pentad.schedules.ir.instruction import Instruction, Op
from pentad.schedules.simulate.costs import Costs

DIGITS = 12  # of the dearest operation's cost that are told apart
NEVER = 1 << 100  # ticks


class Knobs(NamedTuple):
    """`late`: a last warm-up forward may delay the first backward. `backward`: hold a forward back where the next rank
    is two forwards behind. `eager`: a weight gradient may delay what it precedes even on the rank that idles most.
    """

    late: bool
    backward: bool
    eager: bool


class Ticks(NamedTuple):
    """Costs of every rank, and of the hops by the rank that receives, in whole ticks: sums that are equal compare
    equal."""

    forward: list[int]
    backward: list[int]
    weight: list[int]
    hops_f: list[int]
    hops_b: list[int]


def ticks(costs: Costs, ranks: int) -> Ticks:
    tick = 10.0 ** (floor(log10(max(costs.forward + costs.backward + costs.weight))) - DIGITS)

    def told(op: Op, on: range, step: int = 0) -> list[int]:
        return [round(costs.on(rank, Instruction(op, rank, peer=rank + step)) / tick) for rank in on]

    hops_f, hops_b = told(Op.SEND_F, range(ranks - 1), 1), told(Op.SEND_B, range(1, ranks), -1)
    forward, backward, weight = (told(op, range(ranks)) for op in (Op.F, Op.B, Op.W))
    return Ticks(forward, backward, weight, [0, *hops_f], [*hops_b, 0])


class Line:
    """The ranks of a pipeline, one stage each, as they run one operation after the other, as early as inputs allow.

    What a rank keeps is counted in halves of a microbatch's activations (B frees one, W the other), `limit` in whole
    ones, from 1 to `microbatches`.
    """

    def __init__(self, each: Ticks, microbatches: int, limit: float) -> None:
        self.ranks, self.microbatches = len(each.forward), microbatches
        self.room = floor(2 * limit)
        self.forward, self.backward, self.weight, self.hops_f, self.hops_b = each
        self.streams: list[list[Op]] = [[] for _ in each.forward]
        self.clock = [0] * self.ranks
        self.idle = [0] * self.ranks  # since the rank's first forward
        self.kept = [0] * self.ranks
        self.peak = 0  # the most that a rank has kept
        self.pending = [0] * self.ranks  # weight gradients that could run now
        # Ends by rank and microbatch, and whose ends the inputs are; at either end of the line they are there at once
        self.forwards: list[list[int]] = [[] for _ in each.forward]
        self.backwards: list[list[int]] = [[] for _ in each.forward]
        given = [0] * microbatches
        self.activations = [given, *self.forwards[:-1]]
        self.gradients = [*self.backwards[1:], given]

    def activation(self, rank: int) -> int:
        """When the input of a rank's next F is there; NEVER while nothing has made it."""
        made, mb = self.activations[rank], len(self.forwards[rank])
        return made[mb] + self.hops_f[rank] if mb < len(made) else NEVER

    def gradient(self, rank: int) -> int:
        """When the input of a rank's next B is there; NEVER while nothing has made it."""
        made, mb = self.gradients[rank], len(self.backwards[rank])
        return made[mb] + self.hops_b[rank] if mb < len(made) and mb < len(self.forwards[rank]) else NEVER

    def run(self, rank: int, op: Op) -> None:
        if op is Op.F:
            end = self._start(rank, self.activation(rank)) + self.forward[rank]
            self.forwards[rank].append(end)
            self.kept[rank] = kept = self.kept[rank] + 2
            self.peak = max(self.peak, kept)
        else:
            self.kept[rank] -= 1
            if op is Op.B:
                end = self._start(rank, self.gradient(rank)) + self.backward[rank]
                self.backwards[rank].append(end)
                self.pending[rank] += 1
            else:
                end = self.clock[rank] + self.weight[rank]
                self.pending[rank] -= 1
        self.clock[rank] = end
        self.streams[rank].append(op)

    def _start(self, rank: int, arrival: int) -> int:
        clock = self.clock[rank]
        if arrival <= clock:
            return clock
        if self.streams[rank]:
            self.idle[rank] += arrival - clock
        return arrival

    def excess(self, rank: int) -> int:
        """Weight gradients that must run before one more forward keeps to the limit; none or less: it does so."""
        return self.kept[rank] + 2 - self.room

    def slack(self, rank: int) -> int:
        """How much more a rank may idle before it idles most of all."""
        return max(self.idle) - self.idle[rank]

    def spans(self) -> tuple[int, int]:
        """Longest and makespan."""
        starts = [ends[0] - cost for ends, cost in zip(self.forwards, self.forward, strict=True)]
        return max(end - start for end, start in zip(self.clock, starts, strict=True)), max(self.clock)


def greedy(line: Line, knobs: Knobs) -> Line:
    """Runs a whole step."""
    _warm_up(line, knobs.late)
    for _ in range(1, line.microbatches):
        _forwards(line, knobs)
        _backwards(line, knobs.eager)
    for rank in range(line.ranks):
        for _ in range(line.pending[rank]):
            line.run(rank, Op.W)
    return line


def _warm_up(line: Line, late: bool) -> None:
    """Up to the first backward of every rank: forwards in the time that its gradient takes to come."""
    for rank in range(line.ranks):
        line.run(rank, Op.F)
    extra = [0] * line.ranks
    gradient = 0  # when the next rank has made it
    for rank in reversed(range(line.ranks)):
        clock, gradient = line.clock[rank], gradient + line.hops_b[rank]
        while rank + 1 < line.ranks and 1 + extra[rank] < line.microbatches and 2 * (2 + extra[rank]) <= line.room:
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


def _forwards(line: Line, knobs: Knobs) -> None:
    """At most one forward a rank; where a rank has none, those before it have none."""
    expected = [_wants_forward(line, rank, knobs.backward) for rank in range(line.ranks)]
    for rank in reversed(range(line.ranks - 1)):
        expected[rank] = expected[rank] and expected[rank + 1]
    for rank in range(line.ranks):
        if expected[rank]:
            for _ in range(line.excess(rank)):
                line.run(rank, Op.W)
            _fill(line, rank, line.activation(rank), knobs.eager)
            line.run(rank, Op.F)


def _backwards(line: Line, eager: bool) -> None:
    """One backward a rank, from the last rank to the first."""
    for rank in reversed(range(line.ranks)):
        _fill(line, rank, line.gradient(rank), eager)
        if rank == 0 and len(line.forwards[rank]) == line.microbatches:  # nothing waits for its backwards
            for _ in range(line.pending[rank]):
                line.run(rank, Op.W)
        line.run(rank, Op.B)


def _fill(line: Line, rank: int, until: int, eager: bool) -> None:
    """Weight gradients into the gap before `until`; the last one may delay what comes then."""
    while line.pending[rank] and line.clock[rank] + line.weight[rank] <= until:
        line.run(rank, Op.W)
    gap = until - line.clock[rank]
    if line.pending[rank] and gap > 0 and (eager or gap > line.slack(rank)):
        line.run(rank, Op.W)


def _wants_forward(line: Line, rank: int, backward: bool) -> bool:
    done = len(line.forwards[rank])
    excess = line.excess(rank)
    if done == line.microbatches or excess > line.pending[rank]:
        return False
    if not backward or rank + 1 == line.ranks or done < len(line.forwards[rank + 1]) + 2:
        return True
    # The next rank has a forward in stock: is the gradient that it sends after that forward worth waiting for?
    after = rank + 1
    gradient = line.clock[after] + line.forward[after] + line.backward[after] + line.hops_b[rank]
    gap = gradient - line.clock[rank]
    if gap <= 0:
        return False
    return line.forward[rank] + max(excess, 0) * line.weight[rank] <= gap or gap > line.slack(rank)
