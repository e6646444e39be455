"""Interleaved schedules: a rank holds several chunks of layers, and a group of microbatches takes turns on them.

Narayanan et al. 2021, arXiv 2104.04473, section 2.2; groups of any size: Llama Team 2024, arXiv 2407.21783, section
3.3. A group of `ranks` is depth-first, one of all microbatches breadth-first (Lamy-Poirier 2022, arXiv 2211.05953).
"""

from __future__ import annotations

from collections.abc import Iterator

from pentad.schedules.instruction import Instruction, Op, Unit
from pentad.schedules.shape import Shape


def interleaved(rank: int, shape: Shape) -> Iterator[Unit]:
    """1F1B over turns: a chunk's share of the bubble, for (chunks - 1) x group more activations of a chunk."""
    forwards, backwards = _turns(rank, shape, down=False), _turns(rank, shape, down=True)
    warm_up = min(2 * (shape.ranks - 1 - rank) + (shape.chunks - 1) * group_sizes(shape)[0], len(forwards))
    # Warm-up: forwards until the first group has been through all chunks of the last rank.
    for stage, mb in forwards[:warm_up]:
        yield Instruction(Op.F, stage, mb)
    # Steady state: one forward, one backward.
    for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
        yield Instruction(Op.F, *forward)
        yield Instruction(Op.BW, *backward)
    # Cool-down: the backwards that are left.
    for stage, mb in backwards[len(forwards) - warm_up :]:
        yield Instruction(Op.BW, stage, mb)


def interleaved_zb(rank: int, shape: Shape) -> Iterator[Unit]:
    """ZB-H1 over turns (Qi et al. 2023, arXiv 2401.10241): half the slope of warm-up, and W lags by `rank` turns."""
    forwards, backwards = _turns(rank, shape, down=False), _turns(rank, shape, down=True)
    warm_up = min(shape.ranks - 1 - rank + (shape.chunks - 1) * group_sizes(shape)[0], len(forwards) - 1)
    # Warm-up: forwards until the first group has been through all chunks of the last rank.
    for stage, mb in forwards[:warm_up]:
        yield Instruction(Op.F, stage, mb)
    # Steady state: F, B, and W once it lags far enough behind B; then without the forwards.
    for turn, backward in enumerate(backwards):
        if warm_up + turn < len(forwards):
            yield Instruction(Op.F, *forwards[warm_up + turn])
        yield Instruction(Op.B, *backward)
        if turn >= rank:
            yield Instruction(Op.W, *backwards[turn - rank])
    # Cool-down: the deferred weight gradients.
    for stage, mb in backwards[max(0, len(backwards) - rank) :]:
        yield Instruction(Op.W, stage, mb)


def looped_bfs(rank: int, shape: Shape) -> Iterator[Unit]:
    """All microbatches forward through chunk after chunk, then all backward: each chunk's weights are needed twice a
    step, once each way (Lamy-Poirier 2022, arXiv 2211.05953)."""
    for stage, mb in _turns(rank, shape, down=False):
        yield Instruction(Op.F, stage, mb)
    for stage, mb in _turns(rank, shape, down=True):
        yield Instruction(Op.BW, stage, mb)


def group_sizes(shape: Shape) -> list[int]:
    """Microbatches of each group: all of them in groups of `group` or, where that leaves a rest, a few more, because
    a group smaller than the pipeline would not fill it."""
    groups = shape.microbatches // shape.group
    share, rest = divmod(shape.microbatches, groups)
    return [share + (number < rest) for number in range(groups)]


def _turns(rank: int, shape: Shape, *, down: bool) -> list[tuple[int, int]]:
    """(stage, microbatch) in order: a group through one chunk, then through the next."""
    chunks = range(shape.chunks - 1, -1, -1) if down else range(shape.chunks)
    turns, start = [], 0
    for size in group_sizes(shape):
        turns += [(chunk * shape.ranks + rank, mb) for chunk in chunks for mb in range(start, start + size)]
        start += size
    return turns
