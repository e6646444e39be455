"""Schedules that split the backward: ZB-H1 and ZB-H2 (Qi et al. 2023, arXiv 2401.10241, section 2 and table 2)."""

from __future__ import annotations

from collections.abc import Iterator

from pentad.schedules.ir.instruction import Instruction, Op, Unit


def zb_h1(rank: int, ranks: int, microbatches: int) -> Iterator[Unit]:
    """W lags `rank` microbatches behind B, so every rank saves at most `ranks` microbatches: the memory of 1F1B."""
    return _split_backward(rank, microbatches, warm_up=ranks - 1 - rank, lag=rank)


def zb_h2(rank: int, ranks: int, microbatches: int) -> Iterator[Unit]:
    """Twice the warm-up and twice the lag: with `2 * ranks - 1` or more microbatches there is no bubble, if the
    optimizer step needs no barrier."""
    return _split_backward(rank, microbatches, warm_up=2 * (ranks - 1 - rank), lag=2 * rank)


def _split_backward(rank: int, microbatches: int, warm_up: int, lag: int) -> Iterator[Unit]:
    warm_up = min(warm_up, microbatches - 1)
    # Warm-up: forwards that fill the pipeline.
    for mb in range(warm_up):
        yield Instruction(Op.F, rank, mb)
    # Steady state: F, B, and W once it lags far enough behind B.
    for mb in range(microbatches):
        if warm_up + mb < microbatches:
            yield Instruction(Op.F, rank, warm_up + mb)
        yield Instruction(Op.B, rank, mb)
        if mb >= lag:
            yield Instruction(Op.W, rank, mb - lag)
    # Cool-down: the deferred weight gradients.
    for mb in range(max(microbatches - lag, 0), microbatches):
        yield Instruction(Op.W, rank, mb)
