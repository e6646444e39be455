"""Seq1F1B: 1F1B on slices of sequences (Sun et al. 2024, arXiv 2406.03488)."""

from __future__ import annotations

from collections.abc import Iterator

from pentad.schedules.ir.instruction import Instruction, Op, Unit
from pentad.schedules.spec.schedule_spec import ScheduleSpec


def seq_1f1b(rank: int, shape: ScheduleSpec) -> Iterator[Unit]:
    """The bubble of 1F1B over `slices`, for `ranks - rank - 1 + slices` slices kept, at most, of all microbatches.

    The queue of the backward is ordered in part: microbatches first in, first out, as in 1F1B, and of a microbatch the
    slices last in, first out, since a slice's keys and values get gradients from all later ones.
    """
    pieces = shape.microbatches * shape.slices
    backwards = [mb * shape.slices + k for mb in range(shape.microbatches) for k in reversed(range(shape.slices))]
    warm_up = min(shape.ranks - rank - 2 + shape.slices, pieces)
    # Warm-up: slices until the last rank has a whole microbatch but one and can turn around.
    for piece in range(warm_up):
        yield Instruction(Op.F, rank, piece)
    # Steady state: one forward, one backward, of slices.
    for piece, back in zip(range(warm_up, pieces), backwards, strict=False):
        yield Instruction(Op.F, rank, piece)
        yield Instruction(Op.BW, rank, back)
    # Cool-down: the backwards that are left.
    for back in backwards[pieces - warm_up :]:
        yield Instruction(Op.BW, rank, back)
