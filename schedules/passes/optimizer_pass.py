"""Passes for the end of a step: reducing gradients over the holders of a stage, and the optimizer."""

from __future__ import annotations

import numpy as np

from pentad.schedules.ir.instruction import Instruction, Key, Op
from pentad.schedules.ir.lookup import IS_COMPUTE, IS_REDUCTION, IS_SEND, IS_WEIGHT
from pentad.schedules.ir.program import Program
from pentad.schedules.ir.rewrite import Addition, insert


def add_reduce(program: Program, *, replicas: int, scatter: bool = False, buckets: tuple[int, ...] = ()) -> Program:
    """After the last W of every stage that several ranks hold (replicas, DualPipe mirrors), an ALL_REDUCE of its
    gradients, or with `scatter` a REDUCE_SCATTER, where holders update a shard each (ZeRO).

    A stage in several `buckets` (see `MemoryOptions`) has one per bucket, last bucket first, since the backward pass
    finishes that first. Collectives meet by position, so all ranks reduce stages in one order: that in which the last
    holder of each stage finishes its gradients.
    """
    columns, last = program.columns, last_weight_grads(program)
    op = Op.REDUCE_SCATTER if scatter else Op.ALL_REDUCE
    finished: dict[int, int] = {}
    for (_, stage), row in last.items():
        finished[stage] = max(finished.get(stage, 0), columns.position(row)[1])
    additions: list[Addition] = []
    for rank, stages in enumerate(program.placement):
        position = 0
        for stage in sorted(stages, key=lambda stage: (finished.get(stage, 0), stage)):
            if replicas > 1 or len(program.holders(stage)) > 1:
                row = last[rank, stage]
                position, key = max(position, _after_sends(program, rank, row)), columns.key(row)
                for bucket in reversed(bucket_numbers(buckets, stage)):
                    reduction = Instruction(op, stage, bucket, group=f"stage{stage}", waits=(key,))
                    additions.append((rank, position, reduction))
    return insert(program, additions)


def bucket_numbers(buckets: tuple[int, ...], stage: int) -> range:
    """The microbatch field of a stage's reductions: -1 for a single bucket."""
    count = buckets[stage] if buckets else 1
    return range(count) if count > 1 else range(-1, 0)


def _after_sends(program: Program, rank: int, row: int) -> int:
    """The position after an action and its sends, which another rank waits for."""
    columns, end = program.columns, program.columns.rank_offsets[rank + 1]
    while row + 1 < end and IS_SEND[columns.op[row + 1]]:
        row += 1
    return columns.position(row)[1] + 1


def add_step(program: Program) -> Program:
    """NORM and STEP at the end of every stream, where STEP waits for the global norm (a barrier)."""
    additions: list[Addition] = []
    for rank, (end, last, reductions) in enumerate(complete_gradients(program)):
        norm = Instruction(Op.NORM, group="pp", waits=(last, *reductions))
        additions += [(rank, end, norm), (rank, end, Instruction(Op.STEP, waits=(norm.key,)))]
    return insert(program, additions)


def complete_gradients(program: Program) -> list[tuple[int, Key, tuple[Key, ...]]]:
    """By rank: the end of its stream, and what its gradients are complete after, the last compute instruction and the
    reductions."""
    columns = program.columns
    compute, reductions = columns.rows_of(IS_COMPUTE), columns.rows_of(IS_REDUCTION)
    last = compute[np.searchsorted(compute, columns.rank_offsets[1:]) - 1]
    by_rank = np.split(reductions, np.searchsorted(reductions, columns.rank_offsets[1:-1]))
    found = zip(np.diff(columns.action_offsets).tolist(), last, by_rank, strict=True)
    return [(end, columns.key(row), tuple(map(columns.key, rows))) for end, row, rows in found]


def last_weight_grads(program: Program) -> dict[tuple[int, int], int]:
    """(rank, stage) -> row of its last W or BW."""
    columns = program.columns
    rows = columns.rows_of(IS_WEIGHT)
    holding = program.lookup.holding(columns.rank[rows], columns.stage[rows])
    last = np.full(holding.max(initial=-1) + 1, -1)
    last[holding] = rows
    found = last[last >= 0]
    holdings = zip(columns.rank[found].tolist(), columns.stage[found].tolist(), strict=True)
    return dict(zip(holdings, found.tolist(), strict=True))
