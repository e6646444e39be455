"""Passes for the end of a step: reducing gradients over the holders of a stage, and the optimizer."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from pentad.schedules.ir.columns import CODE, key_columns
from pentad.schedules.ir.instruction import REDUCTIONS, Instruction, Key, Op, instructions_of
from pentad.schedules.ir.lookup import IS_REDUCTION, IS_SEND, IS_WEIGHT
from pentad.schedules.ir.program import Program, Stream
from pentad.schedules.ir.rewrite import Addition, insert, insert_rows


def add_reduce(program: Program, *, replicas: int, scatter: bool = False, every_microbatch: bool = False) -> Program:
    """After the last W of every stage that several ranks hold (replicas, DualPipe mirrors), an ALL_REDUCE of its
    gradients, or with `scatter` a REDUCE_SCATTER, where holders update a shard each (ZeRO).

    Collectives meet by position, so all ranks reduce stages in one order: that in which the last holder of each stage
    finishes its gradients. With `every_microbatch` there is one after the last W of every microbatch instead, whose
    microbatch field counts those of its rank: mirrors compute different ones.
    """
    columns, op = program.columns, Op.REDUCE_SCATTER if scatter else Op.ALL_REDUCE
    if every_microbatch:
        return _reduce_every_microbatch(program, op)
    last = complete_weight_grads(program)
    finished: dict[int, int] = {}
    for (_, stage, _), row in last.items():
        finished[stage] = max(finished.get(stage, 0), columns.position(row)[1])
    additions: list[Addition] = []
    for rank, stages in enumerate(program.placement):
        position = 0
        for stage in sorted(stages, key=lambda stage: (finished.get(stage, 0), stage)):
            if replicas > 1 or len(program.holders(stage)) > 1:
                row = last[rank, stage, -1]
                position, key = max(position, _after_sends(program, rank, row)), columns.key(row)
                additions.append((rank, position, Instruction(op, stage, group=f"stage{stage}", waits=(key,))))
    return insert(program, additions)


def _reduce_every_microbatch(program: Program, op: Op) -> Program:
    columns, found = program.columns, complete_weight_grads(program, every_microbatch=True)
    ranks, stages, numbers = (np.array(part) for part in zip(*found, strict=True))
    rows = np.fromiter(found.values(), np.int64, len(found))
    names = sorted({f"stage{stage}" for stage in stages.tolist()})
    index = np.zeros(program.stages, np.int32)
    index[[int(name.removeprefix("stage")) for name in names]] = np.arange(len(names))
    added = key_columns(np.array([0, len(rows)]), np.full(len(rows), CODE[op]), stages, numbers)
    added = replace(added, groups=tuple(names), group=index[stages])
    added = added.with_waits(np.arange(len(rows)), *columns.keys(rows))
    # after the sends of that action, which another rank waits for
    others = np.append(np.flatnonzero(~IS_SEND[columns.op]), columns.rows)
    before = np.minimum(others[np.searchsorted(others, rows + 1)], columns.rank_offsets[ranks + 1])
    return program.with_streams(insert_rows(columns, added, ranks, before))


def _after_sends(program: Program, rank: int, row: int) -> int:
    """The position after an action and its sends, which another rank waits for."""
    columns, end = program.columns, program.columns.rank_offsets[rank + 1]
    while row + 1 < end and IS_SEND[columns.op[row + 1]]:
        row += 1
    return columns.position(row)[1] + 1


def last_reductions(stream: Stream) -> frozenset[Key]:
    """The reductions of a rank after which a stage's gradients are those of the step."""
    reductions = (part for part in instructions_of(stream) if part.op in REDUCTIONS)
    return frozenset({part.stage: part.key for part in reductions}.values())


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
    reductions = columns.rows_of(IS_REDUCTION)
    by_rank = np.split(reductions, np.searchsorted(reductions, columns.rank_offsets[1:-1]))
    found = zip(np.diff(columns.action_offsets).tolist(), program.lookup.last_compute, by_rank, strict=True)
    return [(end, columns.key(row), tuple(map(columns.key, rows))) for end, row, rows in found]


def complete_weight_grads(program: Program, *, every_microbatch: bool = False) -> dict[tuple[int, int, int], int]:
    """(rank, stage, number) -> row of the W or BW that completes the gradients of the `number`-th microbatch that a
    rank computes of a stage, in order; or with -1 for the number those of the step."""
    columns = program.columns
    rows = columns.rows_of(IS_WEIGHT)
    if every_microbatch:  # W takes the slices of a microbatch from the last to the first
        rows = rows[columns.microbatch[rows] % program.slices == 0]
    holding = program.lookup.holding(columns.rank[rows], columns.stage[rows])
    if every_microbatch:
        order = np.argsort(holding, kind="stable")
        number = np.empty(len(rows), int)
        number[order] = np.arange(len(rows)) - np.searchsorted(holding[order], holding[order])
    else:
        last = np.full(holding.max(initial=-1) + 1, -1)
        last[holding] = rows
        rows = last[last >= 0]
        number = np.full(len(rows), -1)
    places = columns.rank[rows], columns.stage[rows], number
    return dict(zip(zip(*(part.tolist() for part in places), strict=True), rows.tolist(), strict=True))
