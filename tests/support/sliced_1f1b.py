"""A simple 1F1B schedule over sequence slices, whose backwards run through the slices of a microbatch in reverse."""

from __future__ import annotations

from pentad.schedules.ir.instruction import Instruction, Op, Unit
from pentad.schedules.ir.program import Program


def backwards(microbatches: int, slices: int) -> list[int]:
    """Pieces in the order of their backwards, in which gradients accumulate."""
    return [mb * slices + part for mb in range(microbatches) for part in reversed(range(slices))]


def sliced_1f1b(ranks: int, microbatches: int, slices: int, *, split: bool = False) -> Program:
    """`split` makes each backward a B and a W."""
    ops = (Op.B, Op.W) if split else (Op.BW,)
    streams = []
    for rank in range(ranks):
        warm_up = min(ranks - 1 - rank + slices - 1, microbatches * slices)
        units: list[Unit] = [Instruction(Op.F, rank, piece) for piece in range(warm_up)]
        for step, piece in enumerate(backwards(microbatches, slices)):
            if warm_up + step < microbatches * slices:
                units.append(Instruction(Op.F, rank, warm_up + step))
            units += [Instruction(op, rank, piece) for op in ops]
        streams.append(tuple(units))
    placement = tuple((rank,) for rank in range(ranks))
    return Program("seq", tuple(streams), placement, microbatches, slices=slices)
