"""DualPipe: microbatches enter at both ends, and every rank holds a stage and its mirror; and DualPipeV, half of it.

DeepSeek-AI 2024, arXiv 2412.19437, section 3.2.1, and the eight steps of its published implementation.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from pentad.schedules.ir.instruction import Instruction, Op, Overlap, Unit


class _Direction:
    """Hands out the microbatches of one direction, each op in ascending order."""

    def __init__(self, stage: int, first: int) -> None:
        self.stage, self.first, self.given = stage, first, {Op.F: 0, Op.B: 0}

    def take(self, op: Op, kind: Op) -> Instruction:
        mb = self.first + self.given[kind]
        self.given[kind] += 1
        return Instruction(op, self.stage, mb)


def dualpipe(rank: int, ranks: int, microbatches: int) -> Iterator[Unit]:
    """Microbatches below `microbatches / 2` enter at rank 0, the others at the last rank."""
    half, near = ranks // 2, min(rank, ranks - 1 - rank)
    down, up = _Direction(rank, 0), _Direction(ranks - 1 - rank, microbatches // 2)
    zero, one = (down, up) if rank < half else (up, down)
    yield from _eight_steps(half, near, microbatches // 2, zero, one)


def dualpipe_v(rank: int, ranks: int, microbatches: int) -> Iterator[Unit]:
    """DualPipe cut in half: two chunks a rank, placed as a V, and all microbatches enter at rank 0."""
    yield from _eight_steps(ranks, rank, microbatches, _Direction(rank, 0), _Direction(2 * ranks - 1 - rank, 0))


def _eight_steps(half: int, near: int, microbatches: int, zero: _Direction, one: _Direction) -> Iterator[Unit]:
    """Of the `near`-th of `half` ranks. Digits name directions: 0 enters at this rank's nearer end (of a V: goes down).
    Each has so many microbatches."""
    deferred: deque[Instruction] = deque()

    def split(direction: _Direction) -> Instruction:
        backward = direction.take(Op.B, Op.B)
        deferred.append(Instruction(Op.W, backward.stage, backward.microbatch))
        return backward

    def full(direction: _Direction) -> Instruction:
        return direction.take(Op.BW, Op.B)

    def forward(direction: _Direction) -> Instruction:
        return direction.take(Op.F, Op.F)

    # Step 1: nF0
    for _ in range(2 * (half - near - 1)):
        yield forward(zero)
    # Step 2: nF0F1
    for _ in range(near + 1):
        yield forward(zero)
        yield forward(one)
    # Step 3: nB1W1F1
    for _ in range(half - near - 1):
        yield split(one)
        yield deferred.popleft()
        yield forward(one)
    # Step 4 (main): nF0B1F1B0, overlapped; the middle has nothing in flight to overlap the first pair with
    for k in range(microbatches - 2 * half + near + 1):
        if k == 0 and near == half - 1:
            yield forward(zero)
            yield full(one)
        else:
            yield Overlap(forward(zero), full(one))
        yield Overlap(forward(one), full(zero))
    # Step 5: nB1F1B0
    for _ in range(half - near - 1):
        yield full(one)
        yield Overlap(forward(one), full(zero))
    # Step 6: nB1B0, from halfway on with the weight gradients deferred
    backward = full
    for k in range(near + 1):
        if k == (near + 1) // 2 and near % 2 == 1:
            backward = split
        yield backward(one)
        if k == (near + 1) // 2 and near % 2 == 0:
            backward = split
        yield backward(zero)
    # Step 7: nWB0
    for _ in range(half - near - 1):
        yield deferred.popleft()
        yield split(zero)
    # Step 8: nW
    yield from deferred
