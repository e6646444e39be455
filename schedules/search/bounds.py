"""Times that no order of a placement can beat, and which part of the step each one comes from.

Each bound considers one rank, or the path of one microbatch, and ignores all other limits. A rank's memory limits how
many forwards it runs before its first backward, and how many backwards after its last forward; the rest of these phases
is idle time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from math import floor, inf
from typing import NamedTuple

from pentad.schedules.ir.instruction import Instruction, Op
from pentad.schedules.ir.program import Program
from pentad.schedules.simulate.costs import Costs


class Bound(NamedTuple):
    """A time in the unit of the costs, and `why` a step cannot take less."""

    time: float
    why: str


def lower_bound(program: Program, costs: Costs, limit: float | None = None, objective: str = "makespan") -> Bound:
    """The greatest of all bounds for a program's placement, if ranks save at most `limit` microbatches of activations
    (None: any number). `objective` is 'makespan' or 'longest'."""
    runs: list[Counter[int]] = [Counter() for _ in program.streams]
    for (stage, _), rank in program.compute_rank.items():
        runs[rank][stage] += 1
    capacity = inf if limit is None else floor(2 * program.chunks * limit + 1e-6) / 2
    path = _Path(program.placement, costs)
    bounds: list[Bound] = []
    for rank, runs_of_rank in enumerate(runs):
        if runs_of_rank:
            bounds += _of_rank(_Rank(rank, runs_of_rank, program.microbatches, capacity, costs), path, objective)
    if objective == "makespan":
        bounds.append(Bound(path.forward[-1] + path.backward[0] + path.last, "the path of one microbatch"))
    return max(bounds, key=lambda bound: bound.time)


class _Path:
    """The shortest times of a microbatch's path, over all ranks that hold a stage, transfers included.

    By stage s: `arrival[s]`, until its input arrives; `forward[s]`, until the forwards of stages 0 to s have ended;
    `turnaround[s]`, from the end of its F to the arrival of the gradient that its B reads; `backward[s]`, from the
    start of its B to the end of the B of stage 0. `last` is the W after that B; if BW is cheaper, what BW adds to B.
    """

    def __init__(self, placement: tuple[tuple[int, ...], ...], costs: Costs) -> None:
        stages = 1 + max(stage for held in placement for stage in held)
        holders = [[rank for rank, held in enumerate(placement) if stage in held] for stage in range(stages)]

        def least(op: Op, stage: int) -> float:
            return min(costs.seconds_on(rank, Instruction(op, stage)) for rank in holders[stage])

        def hop(source: int, target: int) -> float:
            return min(costs.hop(a, b) for a in holders[source] for b in holders[target])

        f = [least(Op.F, stage) for stage in range(stages)]
        b = [least(Op.B, stage) for stage in range(stages)]
        down = [0.0, *(hop(stage - 1, stage) for stage in range(1, stages))]
        up = [*(hop(stage + 1, stage) for stage in range(stages - 1)), 0.0]
        self.arrival, self.forward, self.turnaround, self.backward = ([0.0] * stages for _ in range(4))
        for s in range(stages):
            self.arrival[s] = down[s] + (self.forward[s - 1] if s else 0.0)
            self.forward[s] = self.arrival[s] + f[s]
            self.backward[s] = b[s] + (up[s - 1] + self.backward[s - 1] if s else 0.0)
        for s in reversed(range(stages - 1)):
            self.turnaround[s] = down[s + 1] + f[s + 1] + self.turnaround[s + 1] + b[s + 1] + up[s]
        first = [[costs.seconds_on(rank, Instruction(op, 0)) for op in (Op.B, Op.W, Op.BW)] for rank in holders[0]]
        self.last = min(min(w, bw - b) for b, w, bw in first)


class _Rank:
    """A rank that runs `runs[stage]` microbatches of a stage and saves at most `capacity` activations of a chunk. `f`,
    `b` and `w` are the costs of its instructions by stage; `work` is the cost of all, with each backward in the cheaper
    form (B and W, or BW)."""

    def __init__(self, rank: int, runs: Counter[int], microbatches: int, capacity: float, costs: Costs) -> None:
        self.rank, self.runs, self.microbatches, self.capacity, self.costs = rank, runs, microbatches, capacity, costs
        self.f, self.b, self.w, bw = (
            {stage: costs.seconds_on(rank, Instruction(op, stage)) for stage in runs}
            for op in (Op.F, Op.B, Op.W, Op.BW)
        )
        self.work = sum(many * (self.f[s] + min(self.b[s] + self.w[s], bw[s])) for s, many in runs.items())

    def most_work(self, seconds: dict[int, float], count: float) -> float:
        """The most work of `count` instructions of an op, at most one per stage and microbatch."""
        total = 0.0
        for stage in sorted(seconds, key=lambda s: -seconds[s]):
            taken = min(count, self.runs[stage])
            total, count = total + taken * seconds[stage], count - taken
        return total

    def before_first_b(self) -> float:
        """The most work that can run before the first B."""
        return self.most_work(self.f, floor(self.capacity) if self.capacity < inf else inf)

    def after_last_b(self) -> float:
        """The most work that can run after the last B: each W has held half an activation until then."""
        return self.most_work(self.w, 2 * self.capacity)

    def after_last_f(self) -> float:
        """The most work that can run after the last F: B and W of an activation, or a W of half of one."""
        b, w = self.b, self.w
        total = sum(many * (b[s] + w[s]) for s, many in self.runs.items())
        return min(total, self.capacity * max(max(b[s] + w[s], 2 * w[s]) for s in b))


def _of_rank(rank: _Rank, path: _Path, objective: str) -> Iterator[Bound]:
    """Bounds for a rank that is idle only where it must be: every start phase with every end phase."""
    runs, makespan = rank.runs, objective == "makespan"
    name = f"rank {rank.rank} has {rank.work:.6g} of work"
    head = min(path.arrival[s] for s in runs) if makespan else 0.0
    low = min(runs)
    # Whether all microbatches enter the rank through its lowest stage.
    through_low = len(set(runs.values())) == 1 and runs[low] == rank.microbatches
    first_gradient = min(
        path.forward[s] + path.turnaround[s] - (0.0 if makespan else path.arrival[low if through_low else s])
        for s in runs
    )
    before_first_b = rank.before_first_b()
    rear = min(path.turnaround[s] + (path.backward[s] + path.last if makespan else rank.b[s]) for s in runs)
    left = min(path.backward[s] - rank.b[s] + (path.last if s else 0.0) for s in runs) if makespan else 0.0
    # If all F fit before the first B, work between the two phases would be counted twice.
    separate = not rank.capacity >= sum(runs.values())
    begins = f"its first gradient comes at {first_gradient:.6g} after {before_first_b:.6g} of F at most"
    # (time of the phase, most work in it, why, whether it can be combined with any phase of the other end)
    starts = [
        (head, 0.0, f"its first input comes at {head:.6g}", False),
        (first_gradient, before_first_b, begins, separate),
    ]
    ends = [
        (0.0, 0.0, "", True),
        (rear, rank.after_last_f(), f", and its last F is back {rear:.6g} after it", separate),
        (max(left, 0.0), rank.after_last_b(), f", and its last B is at the first stage {left:.6g} after it", True),
    ]
    for start, before, begins, start_combines in starts:
        for end, after, finishes, end_combines in ends:
            if not (before and after) or (start_combines and end_combines):
                time = start + max(rank.work - before - after, 0.0) + max(end, after)
                yield Bound(time, f"{name}, {begins}{finishes}")
    if rank.capacity < inf:
        yield _of_memory(rank, path, head)


def _of_memory(rank: _Rank, path: _Path, head: float) -> Bound:
    """A microbatch is saved from its F to its B, half of it until its W, and only a limited number fit at once. A BW,
    which costs less than B and W if launches cost time, does not save that half."""
    half = 0.0 if rank.costs.launch else 0.5
    saved = sum(many * (rank.f[s] + path.turnaround[s] + half * rank.b[s]) for s, many in rank.runs.items())
    last = min(rank.w.values())
    return Bound(
        head + saved / rank.capacity + last,
        f"rank {rank.rank} has room for {rank.capacity:g} activations of a chunk, each saved until its backward",
    )
