"""DualPipe, where microbatches enter at both ends and every rank holds a stage and its mirror; and its half, DualPipeV.

DeepSeek-AI 2024, arXiv 2412.19437, section 3.2.1, and the eight steps of the published implementation.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import count

from pentad.schedules.ir.instruction import Action, Instruction, Op, Overlap


class _Direction:
    """Issues the instructions of one direction; forwards and backwards count up their microbatches from `first`."""

    def __init__(self, stage: int, first: int) -> None:
        self.stage, self.forwards, self.backwards = stage, count(first), count(first)

    def forward(self) -> Instruction:
        return Instruction(Op.F, self.stage, next(self.forwards))

    def backward(self, op: Op) -> Instruction:
        return Instruction(op, self.stage, next(self.backwards))


def dualpipe(rank: int, ranks: int, microbatches: int) -> Iterator[Action]:
    """DualPipe (arXiv 2412.19437, section 3.2.1): microbatches below `microbatches / 2` enter at rank 0, the others at
    the last rank."""
    down, up = _Direction(rank, 0), _Direction(ranks - 1 - rank, microbatches // 2)
    half, distance = ranks // 2, min(rank, ranks - 1 - rank)
    directions = (down, up) if rank < half else (up, down)
    yield from _eight_steps(half, distance, microbatches // 2, *directions)


def dualpipe_v(rank: int, ranks: int, microbatches: int) -> Iterator[Action]:
    """DualPipe cut in half: two chunks per rank, placed as a V, and all microbatches enter at rank 0."""
    yield from _eight_steps(ranks, rank, microbatches, _Direction(rank, 0), _Direction(2 * ranks - 1 - rank, 0))


def _eight_steps(half: int, distance: int, microbatches: int, zero: _Direction, one: _Direction) -> Iterator[Action]:
    """The order of a rank at `distance` (below `half`) from the nearer end of the pipeline.

    In the names of the steps, 0 is the direction that enters at that end (in a V: that goes down) and 1 the other one;
    each has `microbatches`.
    """
    deferred: deque[Instruction] = deque()  # weight gradients

    def split(direction: _Direction) -> Instruction:
        backward = direction.backward(Op.B)
        deferred.append(Instruction(Op.W, backward.stage, backward.microbatch))
        return backward

    def full(direction: _Direction) -> Instruction:
        return direction.backward(Op.BW)

    # Step 1: nF0
    for _ in range(2 * (half - distance - 1)):
        yield zero.forward()
    # Step 2: nF0F1
    for _ in range(distance + 1):
        yield zero.forward()
        yield one.forward()
    # Step 3: nB1W1F1
    for _ in range(half - distance - 1):
        yield split(one)
        yield deferred.popleft()
        yield one.forward()
    # Step 4 (main): nF0B1F1B0, overlapped; the middle rank does not overlap the first pair, as in the implementation
    for k in range(microbatches - 2 * half + distance + 1):
        if k == 0 and distance == half - 1:
            yield zero.forward()
            yield full(one)
        else:
            yield Overlap(zero.forward(), full(one))
        yield Overlap(one.forward(), full(zero))
    # Step 5: nB1F1B0
    for _ in range(half - distance - 1):
        yield full(one)
        yield Overlap(one.forward(), full(zero))
    # Step 6: nB1B0, with deferred weight gradients from halfway on
    for k in range(2 * (distance + 1)):
        backward = full if k <= distance else split
        yield backward(zero if k % 2 else one)
    # Step 7: nWB0
    for _ in range(half - distance - 1):
        yield deferred.popleft()
        yield split(zero)
    # Step 8: nW
    yield from deferred
