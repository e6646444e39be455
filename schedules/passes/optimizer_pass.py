"""Passes for the end of a step: the reduction of gradients between the holders of a stage, and the optimizer."""

from __future__ import annotations

import numpy as np

from pentad.schedules.ir.instruction import Instruction, Key, Op
from pentad.schedules.ir.lookup import IS_COMPUTE, IS_REDUCTION, IS_SEND, IS_WEIGHT
from pentad.schedules.ir.program import Program
from pentad.schedules.ir.rewrite import Addition, insert


def add_reduce(program: Program, *, replicas: int, scatter: bool = False, buckets: tuple[int, ...] = ()) -> Program:
    """An ALL_REDUCE of every stage that more than one rank holds (dp replicas, DualPipe mirrors), after its last W; a
    REDUCE_SCATTER where holders step on a shard each (`scatter`, ZeRO). Of a stage in several `buckets` (see `Savings`)
    there is one for each, numbered by place, the last first: a backward pass is done with that first.

    They come in one order on all ranks, since a collective meets its partner by position: that in which the stages'
    last holders are done with them.
    """
    columns, last = program.columns, last_weights(program)
    op = Op.REDUCE_SCATTER if scatter else Op.ALL_REDUCE
    done: dict[int, int] = {}
    for (_, stage), row in last.items():
        done[stage] = max(done.get(stage, 0), columns.place(row)[1])
    additions: list[Addition] = []
    for rank, stages in enumerate(program.placement):
        place = 0
        for stage in sorted(stages, key=lambda stage: (done.get(stage, 0), stage)):
            if replicas > 1 or len(program.holders(stage)) > 1:
                row = last[rank, stage]
                place, key = max(place, _behind_sends(program, rank, row)), columns.key(row)
                for number in reversed(numbers_of(buckets, stage)):
                    part = Instruction(op, stage, number, group=f"stage{stage}", waits=(key,))
                    additions.append((rank, place, part))
    return insert(program, additions)


def numbers_of(buckets: tuple[int, ...], stage: int) -> range:
    """Numbers of a stage's buckets: -1 where there is but one."""
    count = buckets[stage] if buckets else 1
    return range(count) if count > 1 else range(-1, 0)


def _behind_sends(program: Program, rank: int, row: int) -> int:
    """The place behind a unit and behind what it sends: another rank waits for that."""
    columns, end = program.columns, program.columns.first[rank + 1]
    while row + 1 < end and IS_SEND[columns.op[row + 1]]:
        row += 1
    return columns.place(row)[1] + 1


def add_step(program: Program) -> Program:
    """NORM and STEP at the end of every stream: the barrier form, where a step waits for the global norm."""
    ends = np.diff(program.columns.unit_first).tolist()
    additions: list[Addition] = []
    for rank, (last, reduced) in enumerate(whole_gradients(program)):
        norm = Instruction(Op.NORM, group="pp", waits=(last, *reduced))
        step = Instruction(Op.STEP, waits=(Key(Op.NORM, -1, -1),))
        additions += [(rank, ends[rank], norm), (rank, ends[rank], step)]
    return insert(program, additions)


def whole_gradients(program: Program) -> list[tuple[Key, tuple[Key, ...]]]:
    """Behind what each rank's gradients are whole: its last compute and its reductions."""
    columns = program.columns
    compute, reduces = columns.rows_of(IS_COMPUTE), columns.rows_of(IS_REDUCTION)
    last = compute[np.searchsorted(compute, columns.first[1:]) - 1]
    by_rank = np.split(reduces, np.searchsorted(reduces, columns.first[1:-1]))
    return [(columns.key(row), tuple(map(columns.key, rows))) for row, rows in zip(last, by_rank, strict=True)]


def last_weights(program: Program) -> dict[tuple[int, int], int]:
    """(rank, stage) -> row of the last weight gradient there."""
    columns = program.columns
    rows = columns.rows_of(IS_WEIGHT)
    holding = program.lookup.holding(columns.rank[rows], columns.stage[rows])
    last = np.full(holding.max(initial=-1) + 1, -1)
    last[holding] = rows
    found = last[last >= 0]
    places = zip(columns.rank[found].tolist(), columns.stage[found].tolist(), strict=True)
    return dict(zip(places, found.tolist(), strict=True))
