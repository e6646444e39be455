"""What instructions cost: the input of simulation, search and planning."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from math import inf
from typing import Any

import numpy as np

from pentad.schedules.ir.columns import OPS, Array, op_mask
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.ir.instruction import COMPUTE, RECEIVES, SENDS, Instruction, Op
from pentad.schedules.ir.lookup import IS_RECEIVE, IS_SEND
from pentad.schedules.ir.program import Program

WIDEST = 1e6  # a larger ratio of costs loses the small ones when they are summed
RUNS_KERNELS = COMPUTE | {Op.RECOMPUTE}  # what a slow rank runs slower


@dataclass(frozen=True)
class Costs:
    """Seconds, or any other unit, of every kind of instruction.

    `forward`, `backward` (input gradients only) and `weight` (weight gradients) hold one entry per stage, for one
    microbatch; so do `recompute` (empty: as `forward`; 0: nothing is launched), `offload`, the time of one OFFLOAD or
    RELOAD (empty: 0), `reduce`, that of an all-reduce of the stage's gradients (empty: 0), and `gather`, that of an
    all-gather of its weights (empty: half of `reduce`). A REDUCE_SCATTER takes half of `reduce`; the last one of a
    stage in a step also takes `reduce_replicas`, in which replicas of a shard add up their gradients (empty: 0). With
    sliced sequences an entry is for one slice: all slices cost the same, although under a causal mask later ones attend
    to more tokens. `transfer` is one activation or gradient sent to another rank, `norm` and `step` the end of a step
    (`norm` also that of an evaluation), `validate_step` the update of master weights that post-validation makes in the
    next step; `launch` is added to every compute instruction.

    `slowdown` holds a factor per pipeline rank for its compute, launches included (empty: 1), and
    `links[source][target]` the time of a transfer between two pipeline ranks (empty: `transfer`).
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    weight: tuple[float, ...]
    transfer: float = 0.0
    norm: float = 0.0
    step: float = 0.0
    launch: float = 0.0
    slowdown: tuple[float, ...] = ()
    links: tuple[tuple[float, ...], ...] = ()
    recompute: tuple[float, ...] = ()
    offload: tuple[float, ...] = ()
    reduce: tuple[float, ...] = ()
    gather: tuple[float, ...] = ()
    reduce_replicas: tuple[float, ...] = ()
    validate_step: float = 0.0

    @staticmethod
    def uniform(
        stages: int,
        forward: float = 1.0,
        backward: float = 1.0,
        weight: float = 1.0,
        *,
        chunks: int = 1,
        slices: int = 1,
        transfer: float = 0.0,
    ) -> Costs:
        """The same for every stage. `forward`, `backward` and `weight` are for one microbatch and all layers of a rank,
        `transfer` is for one microbatch: a chunk takes 1/chunks of the former, a slice 1/slices of both.

        Raises PentadError on costs that are not finite and positive, or too far apart to be summed.
        """
        for name, value in {"F": forward, "B": backward, "W": weight}.items():
            if not 0 < value < inf:
                raise PentadError(f"--costs: {name} is {value}: expected a finite number greater than 0")
        if (ratio := max(forward, backward, weight) / min(forward, backward, weight)) > WIDEST:
            raise PentadError(
                f"--costs: the largest is {ratio:g} times the smallest: expected at most {WIDEST:g} times"
            )
        if not 0 <= transfer < inf:
            raise PentadError(f"--comm is {transfer}: expected a finite number of at least 0")
        f, b, w = ((value / (chunks * slices),) * stages for value in (forward, backward, weight))
        return Costs(f, b, w, transfer / slices)

    def with_offload(self, seconds: tuple[float, ...]) -> Costs:
        """With other times of OFFLOAD and RELOAD, by stage."""
        return replace(self, offload=seconds)

    def of_stages(self, units: Sequence[int]) -> Costs:
        """The costs of stages from those of their units, of which stage s has `units[s]`; empty: one each."""
        if not units:
            return self
        ends = list(accumulate(units, initial=0))

        def sums(values: tuple[float, ...]) -> tuple[float, ...]:
            return tuple(sum(values[first:end]) for first, end in pairwise(ends)) if values else ()

        fields = ("forward", "backward", "weight", "recompute", "offload", "reduce", "gather", "reduce_replicas")
        by_stage: dict[str, Any] = {field: sums(getattr(self, field)) for field in fields}
        return replace(self, **by_stage)

    def seconds(self, instruction: Instruction) -> float:
        """Time of one instruction on a rank of normal speed, without waiting and without `reduce_replicas`."""
        stage = instruction.stage
        match instruction.op:
            case Op.F:
                return self.forward[stage] + self.launch
            case Op.B:
                return self.backward[stage] + self.launch
            case Op.W:
                return self.weight[stage] + self.launch
            case Op.BW:
                return self.backward[stage] + self.weight[stage] + self.launch
            case Op.SEND_F | Op.RECV_F | Op.SEND_B | Op.RECV_B:
                return self.transfer
            case Op.RECOMPUTE:
                seconds = (self.recompute or self.forward)[stage]
                return seconds + self.launch if seconds else 0.0
            case Op.OFFLOAD | Op.RELOAD:
                return self.offload[stage] if self.offload else 0.0
            case Op.ALL_REDUCE:
                return self.reduce[stage] if self.reduce else 0.0
            case Op.ALL_GATHER if self.gather:
                return self.gather[stage]
            case Op.REDUCE_SCATTER | Op.ALL_GATHER:  # an all-reduce is one after the other
                return self.reduce[stage] / 2 if self.reduce else 0.0
            case Op.NORM | Op.LOSS:
                return self.norm
            case Op.STEP:
                return self.step
            case Op.VALIDATE:
                return self.validate_step
            case _:
                return 0.0

    def seconds_on(self, rank: int, instruction: Instruction) -> float:
        """`seconds`, with the slowdown and the links of a pipeline rank."""
        if instruction.op in SENDS:
            return self.hop(rank, instruction.peer)
        if instruction.op in RECEIVES:
            return self.hop(instruction.peer, rank)
        seconds = self.seconds(instruction)
        return seconds * self.slowdown[rank] if self.slowdown and instruction.op in RUNS_KERNELS else seconds

    def hop(self, source: int, target: int) -> float:
        """Time of a transfer from one pipeline rank to another; 0 from a rank to itself."""
        if source == target:
            return 0.0
        return self.links[source][target] if self.links else self.transfer

    def validate(self, ranks: int) -> None:
        """Raises PentadError unless `slowdown` and `links` fit `ranks` pipeline ranks."""
        if len(self.slowdown) not in (0, ranks):
            raise PentadError(
                f"costs.slowdown has {len(self.slowdown)} factors: expected one for each of {ranks} ranks"
            )
        if len(self.links) not in (0, ranks) or any(len(row) != ranks for row in self.links):
            rows = [len(row) for row in self.links]
            raise PentadError(f"costs.links has rows of {rows} entries: expected {ranks} rows of {ranks}")
        for rank, factor in enumerate(self.slowdown):
            if not 0 < factor < inf:
                raise PentadError(f"costs.slowdown[{rank}] is {factor}: expected a finite number greater than 0")
        for (source, target), seconds in np.ndenumerate(self.links):
            if not 0 <= seconds < inf:
                key = f"costs.links[{source}][{target}]"
                raise PentadError(f"{key} is {seconds}: expected a finite number of at least 0")


def instruction_seconds(program: Program, costs: Costs) -> Array:
    """`costs.seconds_on` for every row of a program, including `reduce_replicas`."""
    columns = program.columns
    table = np.zeros((len(OPS), program.stages + 1))  # [op, stage]; the last column is for stage -1
    for code in np.flatnonzero(np.bincount(columns.op, ~(IS_SEND | IS_RECEIVE)[columns.op])).tolist():
        table[code] = [costs.seconds(Instruction(OPS[code], stage)) for stage in (*range(program.stages), -1)]
    found = table[columns.op, columns.stage]
    if costs.slowdown:
        compute = columns.rows_of(op_mask(RUNS_KERNELS))
        found[compute] *= np.array(costs.slowdown)[columns.rank[compute]]
    if costs.reduce_replicas:
        rows = columns.rows_of(op_mask({Op.REDUCE_SCATTER}))[::-1]
        places = columns.rank[rows] * program.stages + columns.stage[rows]
        rows = rows[np.unique(places, return_index=True)[1]]  # the last ones
        found[rows] += np.array(costs.reduce_replicas)[columns.stage[rows]]
    for kind, source, target in ((IS_SEND, columns.rank, columns.peer), (IS_RECEIVE, columns.peer, columns.rank)):
        rows = columns.rows_of(kind)
        found[rows] = hops(costs, source[rows], target[rows])
    return found


def hops(costs: Costs, source: Array, target: Array) -> Array:
    """`costs.hop` for arrays of ranks."""
    between = np.array(costs.links)[source, target] if costs.links else np.full(len(source), costs.transfer)
    return np.where(source == target, 0.0, between)
