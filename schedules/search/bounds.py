"""Times that no order of a placement can beat, and which part of the step says so.

Each bound looks at one rank, or at the way of one microbatch, and leaves everything else free. Forwards before a rank's
first backward and backwards after its last forward are as many as its memory allows; what they do not fill is idle.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from math import floor, inf
from typing import NamedTuple

from pentad.schedules.ir.instruction import Instruction, Op
from pentad.schedules.ir.program import Program
from pentad.schedules.simulate.costs import Costs


class Bound(NamedTuple):
    """A time in the unit of the costs, and `why` a step cannot take less."""

    time: float
    why: str


def lower_bound(program: Program, costs: Costs, limit: float | None = None, by: str = "makespan") -> Bound:
    """The greatest of all bounds of a program's placement where ranks keep at most `limit` microbatches of activations
    (None: any number); `by` is 'makespan' or 'longest'."""
    runs: list[Counter[int]] = [Counter() for _ in program.streams]
    for (stage, _), rank in program.home.items():
        runs[rank][stage] += 1
    rooms = inf if limit is None else floor(2 * program.chunks * limit + 1e-6) / 2
    way = _Way(program.placement, costs)
    bounds = [
        bound
        for rank, each in enumerate(runs)
        for bound in _of_rank(_Rank(rank, each, program.microbatches, rooms, costs, way), by)
    ]
    if by == "makespan":
        bounds.append(Bound(way.there[-1] + way.back[0] + way.last, "the way of one microbatch there and back"))
    return max(bounds, key=lambda bound: bound.time)


class _Way:
    """What a microbatch needs at least on its way, on whichever of a stage's ranks; transfers between ranks included.

    `come[s]` until stage s has its input, `there[s]` until stages 0 to s are through, `turn[s]` from the end of F on
    stage s to the gradient that its B reads, `back[s]` from the start of B on stage s to the end of the last B, `last`
    the W after it, which costs no launch where both are one BW.
    """

    def __init__(self, placement: tuple[tuple[int, ...], ...], costs: Costs) -> None:
        stages = 1 + max(stage for held in placement for stage in held)
        holders = [[rank for rank, held in enumerate(placement) if stage in held] for stage in range(stages)]

        def least(op: Op, stage: int) -> float:
            return min(costs.on(rank, Instruction(op, stage)) for rank in holders[stage])

        def hop(source: int, target: int) -> float:
            return min(costs.hop(a, b) for a in holders[source] for b in holders[target])

        f = [least(Op.F, stage) for stage in range(stages)]
        b = [least(Op.B, stage) for stage in range(stages)]
        down = [0.0, *(hop(stage - 1, stage) for stage in range(1, stages))]
        up = [*(hop(stage + 1, stage) for stage in range(stages - 1)), 0.0]
        self.come, self.there, self.turn, self.back = ([0.0] * stages for _ in range(4))
        for s in range(stages):
            self.come[s] = down[s] + (self.there[s - 1] if s else 0.0)
            self.there[s] = self.come[s] + f[s]
            self.back[s] = b[s] + (up[s - 1] + self.back[s - 1] if s else 0.0)
        for s in reversed(range(stages - 1)):
            self.turn[s] = down[s + 1] + f[s + 1] + self.turn[s + 1] + b[s + 1] + up[s]
        first = [[costs.on(rank, Instruction(op, 0)) for op in (Op.B, Op.W, Op.BW)] for rank in holders[0]]
        self.last = min(min(w, whole - b) for b, w, whole in first)


@dataclass(frozen=True)
class _Rank:
    """`runs[stage]` microbatches on a rank that keeps at most `room` activations of a chunk."""

    rank: int
    runs: Counter[int]
    microbatches: int
    room: float
    costs: Costs
    way: _Way

    def seconds(self, op: Op, stage: int) -> float:
        return self.costs.on(self.rank, Instruction(op, stage))

    def work(self) -> float:
        """All of it, a backward in whichever form is quicker."""
        f, b, w, whole = ({s: self.seconds(op, s) for s in self.runs} for op in (Op.F, Op.B, Op.W, Op.BW))
        return sum(many * (f[s] + min(b[s] + w[s], whole[s])) for s, many in self.runs.items())

    def most(self, pieces: dict[int, float], units: float) -> float:
        """The most work of so many pieces, each stage giving at most as many as it has microbatches."""
        total = 0.0
        for stage in sorted(pieces, key=lambda s: -pieces[s]):
            taken = min(units, self.runs[stage])
            total, units = total + taken * pieces[stage], units - taken
        return total

    def forwards(self) -> float:
        """The most that can run before the first B."""
        return self.most({s: self.seconds(Op.F, s) for s in self.runs}, floor(self.room) if self.room < inf else inf)

    def weights(self) -> float:
        """The most that can run after the last B: each W has kept half an activation."""
        return self.most({s: self.seconds(Op.W, s) for s in self.runs}, 2 * self.room)

    def backwards(self) -> float:
        """The most that can run after the last F: B and W of a whole activation, or a W of half of one."""
        f, b, w = ({s: self.seconds(op, s) for s in self.runs} for op in (Op.F, Op.B, Op.W))
        whole = sum(many * (b[s] + w[s]) for s, many in self.runs.items())
        return min(whole, self.room * max(max(b[s] + w[s], 2 * w[s]) for s in f))


def _of_rank(of: _Rank, by: str) -> Iterator[Bound]:
    """Bounds for a rank that is idle only where it must be."""
    if not of.runs:
        return
    way, work, makespan = of.way, of.work(), by == "makespan"
    name = f"rank {of.rank} has {work:.6g} of work"
    head = min(way.come[s] for s in of.runs) if makespan else 0.0
    # Of the start: when it can be, and the most that runs before it; of the end likewise, behind it
    low = min(of.runs)
    whole = len(set(of.runs.values())) == 1 and of.runs[low] == of.microbatches  # all come in through the lowest stage
    first = min(way.there[s] + way.turn[s] - (0.0 if makespan else way.come[low if whole else s]) for s in of.runs)
    filled = of.forwards()
    room = of.room >= sum(of.runs.values())  # all F may come before the first B: what is between would count twice
    rear = min(way.turn[s] + (way.back[s] + way.last if makespan else of.seconds(Op.B, s)) for s in of.runs)
    left = min(way.back[s] - of.seconds(Op.B, s) + (way.last if s else 0.0) for s in of.runs) if makespan else 0.0
    starts = [
        (head, 0.0, f"its first input comes at {head:.6g}", False),
        (first, filled, f"its first gradient comes at {first:.6g} after {filled:.6g} of F at most", not room),
    ]
    ends = [
        (0.0, 0.0, "", True),
        (rear, of.backwards(), f", and its last F is back {rear:.6g} after it", not room),
        (max(left, 0.0), of.weights(), f", and its last B is at the first stage {left:.6g} after it", True),
    ]
    for start, before, begins, apart in starts:
        for end, after, finishes, free in ends:
            if before and after and not (apart and free):
                continue
            yield Bound(start + max(work - before - after, 0.0) + max(end, after), f"{name}, {begins}{finishes}")
    if of.room < inf:
        yield _of_memory(of, head)


def _of_memory(of: _Rank, head: float) -> Bound:
    """A microbatch is kept from its F to its B, half of it to its W: so many at once, that long each. A BW, which is no
    B and W where launches cost, keeps none of it."""
    f, b = ({s: of.seconds(op, s) for s in of.runs} for op in (Op.F, Op.B))
    half = 0.0 if of.costs.launch else 0.5
    kept = sum(many * (f[s] + of.way.turn[s] + half * b[s]) for s, many in of.runs.items())
    last = min(of.seconds(Op.W, s) for s in of.runs)
    return Bound(
        head + kept / of.room + last,
        f"rank {of.rank} has room for {of.room:g} activations of a chunk, and each is kept for its way there and back",
    )
