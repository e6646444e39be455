"""Schedules with the whole backward at once: GPipe, 1F1B and its eager form."""

from __future__ import annotations

from collections.abc import Iterator

from pentad.schedules.ir.instruction import Instruction, Op, Unit


def gpipe(rank: int, ranks: int, microbatches: int) -> Iterator[Unit]:
    """All forwards, then all backwards, in microbatch order (Huang et al. 2019, arXiv 1811.06965)."""
    for mb in range(microbatches):
        yield Instruction(Op.F, rank, mb)
    for mb in range(microbatches):
        yield Instruction(Op.BW, rank, mb)


def one_f_one_b(rank: int, ranks: int, microbatches: int) -> Iterator[Unit]:
    """PipeDream-flush (Narayanan et al. 2021, arXiv 2006.09503): at most `ranks - rank` microbatches in flight."""
    yield from _one_by_one(rank, microbatches, warm_up=ranks - 1 - rank)


def eager_one_f_one_b(rank: int, ranks: int, microbatches: int) -> Iterator[Unit]:
    """Twice the warm-up (Zhuang et al. 2023, arXiv 2211.05322, section 4): the same bubble, and transfers pass beside
    compute in the steady state, for up to `2 * (ranks - rank) - 1` microbatches in flight."""
    yield from _one_by_one(rank, microbatches, warm_up=2 * (ranks - 1 - rank))


def _one_by_one(rank: int, microbatches: int, warm_up: int) -> Iterator[Unit]:
    warm_up = min(warm_up, microbatches)
    # Warm-up: forwards until the last rank can turn around.
    for mb in range(warm_up):
        yield Instruction(Op.F, rank, mb)
    # Steady state: one forward, one backward.
    for k in range(microbatches - warm_up):
        yield Instruction(Op.F, rank, warm_up + k)
        yield Instruction(Op.BW, rank, k)
    # Cool-down: the backwards that are left.
    for mb in range(microbatches - warm_up, microbatches):
        yield Instruction(Op.BW, rank, mb)
