"""Schedules with one backward for inputs and weights: GPipe, 1F1B, eager 1F1B and Seq1F1B."""

from __future__ import annotations

from collections.abc import Iterator

from pentad.schedules.ir.instruction import Instruction, Op, Unit
from pentad.schedules.ir.program import Stream
from pentad.schedules.spec.schedule_spec import ScheduleSpec


def gpipe(rank: int, ranks: int, microbatches: int) -> Iterator[Unit]:
    """All forwards, then all backwards, in microbatch order (Huang et al. 2019, arXiv 1811.06965)."""
    for mb in range(microbatches):
        yield Instruction(Op.F, rank, mb)
    for mb in range(microbatches):
        yield Instruction(Op.BW, rank, mb)


def one_f_one_b(rank: int, ranks: int, microbatches: int) -> Iterator[Unit]:
    """PipeDream-flush (Narayanan et al. 2021, arXiv 2006.09503): at most `ranks - rank` microbatches in flight."""
    backwards = list(range(microbatches))
    yield from _one_forward_one_backward(rank, backwards, warm_up=ranks - 1 - rank)


def eager_one_f_one_b(rank: int, ranks: int, microbatches: int) -> Iterator[Unit]:
    """Twice the warm-up of 1F1B (Zhuang et al. 2023, arXiv 2211.05322, section 4): the bubble is the same, but in the
    steady state transfers overlap with compute, for up to `2 * (ranks - rank) - 1` microbatches in flight."""
    backwards = list(range(microbatches))
    yield from _one_forward_one_backward(rank, backwards, warm_up=2 * (ranks - 1 - rank))


def seq_1f1b(spec: ScheduleSpec) -> tuple[Stream, ...]:
    """1F1B on slices of sequences (Sun et al. 2024, arXiv 2406.03488): 1 / slices of the bubble of 1F1B, with at most
    `ranks - rank - 1 + slices` slices in flight.

    The backward takes microbatches first in, first out, and the slices of a microbatch last in, first out, because the
    keys and values of a slice get gradients from all later slices.
    """
    slices, ranks = spec.slices, range(spec.ranks)
    backwards = [mb * slices + k for mb in range(spec.microbatches) for k in reversed(range(slices))]
    # The last rank can turn around after all but one of the slices of a microbatch.
    warm_ups = [spec.ranks - 1 - rank + slices - 1 for rank in ranks]
    return tuple(tuple(_one_forward_one_backward(rank, backwards, warm_ups[rank])) for rank in ranks)


def _one_forward_one_backward(rank: int, backwards: list[int], warm_up: int) -> Iterator[Unit]:
    """Forwards in ascending order, backwards in that of `backwards`."""
    count = len(backwards)
    warm_up = min(warm_up, count)
    # Warm-up: forwards until the last rank can turn around.
    for mb in range(warm_up):
        yield Instruction(Op.F, rank, mb)
    # Steady state: one forward, one backward.
    for k in range(count - warm_up):
        yield Instruction(Op.F, rank, warm_up + k)
        yield Instruction(Op.BW, rank, backwards[k])
    # Cool-down: the remaining backwards.
    for mb in backwards[count - warm_up :]:
        yield Instruction(Op.BW, rank, mb)
