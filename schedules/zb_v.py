"""ZB-V: two chunks a rank, placed as a V, so that the first and the last stage share a rank.

Qi et al. 2023, arXiv 2401.10241, section 6; the order is the one of its published implementation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from pentad.schedules.instruction import Instruction, Op, Unit


def zb_v(rank: int, ranks: int, microbatches: int) -> Iterator[Unit]:
    """No bubble without a barrier at equal costs of F, B and W from `2 * ranks - 1` microbatches on, with the
    activations of 1F1B on every rank. Chunk 0 of a rank is stage `rank`, chunk 1 stage `2 * ranks - 1 - rank`."""
    for chunk, op, mb in _padded(rank, ranks, max(2 * ranks - 1, microbatches)):
        if mb < microbatches:
            yield Instruction(op, rank if chunk == 0 else 2 * ranks - 1 - rank, mb)


def _padded(rank: int, ranks: int, microbatches: int) -> Iterator[tuple[int, Op, int]]:
    """(chunk, op, microbatch) of a step that is long enough for all phases."""
    given: Counter[tuple[int, Op]] = Counter()

    def take(chunk: int, *ops: Op) -> Iterator[tuple[int, Op, int]]:
        for op in ops:
            yield chunk, op, given[chunk, op]
            given[chunk, op] += 1

    # Warm-up 1: nF0
    for _ in range(2 * (ranks - rank) - 1):
        yield from take(0, Op.F)
    # Warm-up 2: nF1F0
    for _ in range(rank):
        yield from take(1, Op.F)
        yield from take(0, Op.F)
    # Warm-up 3: nF1B1W1
    for _ in range(ranks - rank):
        yield from take(1, Op.F, Op.B, Op.W)
    # Steady state: nF0B0W0F1B1W1, at the end without the F0 that are through
    while given[1, Op.F] < microbatches:
        if given[0, Op.F] < microbatches:
            yield from take(0, Op.F)
        yield from take(0, Op.B, Op.W)
        yield from take(1, Op.F, Op.B, Op.W)
    # Cool-down 1: nB0B1
    for _ in range(rank):
        yield from take(0, Op.B)
        yield from take(1, Op.B)
    # Cool-down 2: nB0W0
    for _ in range(ranks - rank):
        yield from take(0, Op.B, Op.W)
    # Cool-down 3: the weight gradients that are left
    for chunk in (1, 0):
        while given[chunk, Op.W] < given[chunk, Op.B]:
            yield from take(chunk, Op.W)
