"""Passes for the end of a step: reducing gradients over the holders of a stage, and the optimizer."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from pentad.schedules.ir.columns import CODE, Array, key_columns, op_mask
from pentad.schedules.ir.instruction import REDUCTIONS, Instruction, Key, Op, instructions_of
from pentad.schedules.ir.lookup import IS_REDUCTION, IS_SEND, IS_WEIGHT
from pentad.schedules.ir.program import Program, Stream
from pentad.schedules.ir.rewrite import Addition, insert, insert_rows


def add_reduce(program: Program, *, replicas: int, scatter: bool = False, every_microbatch: bool = False) -> Program:
    """Adds, after the last W of every stage that several ranks hold (replicas, DualPipe mirrors), an ALL_REDUCE of its
    gradients or, with `scatter`, a REDUCE_SCATTER, for holders that update a shard each (ZeRO).

    Collectives are matched by position, so all ranks reduce stages in the same order: that in which the last holder of
    each stage finishes its gradients. With `every_microbatch`, there is one after the last W of every microbatch
    instead; its microbatch field counts the microbatches that its rank computes, as mirrors compute different ones.
    """
    columns, op = program.columns, Op.REDUCE_SCATTER if scatter else Op.ALL_REDUCE
    if every_microbatch:
        return _reduce_every_microbatch(program, op)
    complete = complete_weight_grads(program)
    last = dict(
        zip(zip(complete.rank.tolist(), complete.stage.tolist(), strict=True), complete.row.tolist(), strict=True)
    )
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
                additions.append((rank, position, Instruction(op, stage, group=f"stage{stage}", waits=(key,))))
    return insert(program, additions)


def _reduce_every_microbatch(program: Program, op: Op) -> Program:
    columns, (ranks, stages, numbers, rows) = program.columns, complete_weight_grads(program, every_microbatch=True)
    names = sorted(f"stage{stage}" for stage in np.unique(stages).tolist())
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
    """The last reduction of each stage of a rank, after which its gradients are those of the step."""
    reductions = (part for part in instructions_of(stream) if part.op in REDUCTIONS)
    return frozenset({part.stage: part.key for part in reductions}.values())


def add_step(program: Program) -> Program:
    """NORM and STEP at the end of every stream, where STEP waits for the global norm (a barrier)."""
    norm = Instruction(Op.NORM, group="pp")
    step = Instruction(Op.STEP, waits=(norm.key,))
    ends = enumerate(np.diff(program.columns.action_offsets).tolist())
    found = insert(program, [(rank, end, part) for rank, end in ends for part in (norm, step)])
    return wait_for(found, Op.NORM, program, np.concatenate(complete_gradients(program)))


def wait_for(program: Program, op: Op, earlier: Program, rows: Array) -> Program:
    """The program in which `op`, of which every rank has one, also waits for the instructions in these rows of an
    `earlier` version of the program, each on its rank."""
    waiting = program.columns.rows_of(op_mask({op}))[earlier.columns.rank[rows]]
    return program.with_streams(program.columns.with_waits(waiting, *earlier.columns.keys(rows)))


def complete_gradients(program: Program) -> tuple[Array, Array]:
    """The rows after which all gradients are complete: the last compute instruction of each rank, and the
    reductions."""
    return program.lookup.last_compute, program.columns.rows_of(IS_REDUCTION)


class CompleteGrads(NamedTuple):
    """For each sum of gradients, the row of the W or BW that completes it. A sum is that of the `number`-th microbatch
    that a rank computes on a stage or, if `number` is -1, that of the step."""

    rank: Array
    stage: Array
    number: Array
    row: Array


def complete_weight_grads(program: Program, *, every_microbatch: bool = False) -> CompleteGrads:
    """The sums of every microbatch, in the order of their rows, or those of the step, by rank and stage."""
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
    return CompleteGrads(columns.rank[rows], columns.stage[rows], number, rows)
