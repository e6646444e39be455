"""The part of the proof that follows the data: waits, sends, receives, and the slots that receives fill."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from pentad.schedules.ir.columns import CODE, Array
from pentad.schedules.ir.errors import ScheduleError
from pentad.schedules.ir.instruction import Op
from pentad.schedules.ir.lookup import IS_BACKWARD, IS_COMPUTE, IS_RECEIVE, IS_SEND
from pentad.schedules.ir.program import Program
from pentad.schedules.simulate.dependencies import data_dependencies
from pentad.schedules.verify.buffers import slot_numbers
from pentad.schedules.verify.check_order import error_at

_F = CODE[Op.F]


def prove_waits(program: Program) -> None:
    """Every wait names an earlier instruction of the same stream."""
    columns, targets = program.columns, program.lookup.wait_targets
    wrong = np.flatnonzero((targets < 0) | (columns.unit[targets] >= columns.unit[columns.wait_row]))
    if len(wrong):
        row = columns.wait_row[wrong[0]]
        rank, index = columns.position(row)
        how = "is not in its stream" if targets[wrong[0]] < 0 else "comes after it"
        text = f"{program.streams[rank][index].key} waits for {columns.wait_key(wrong[0])}, which {how}"
        raise error_at(program, row, text)


def prove_data(program: Program) -> None:
    """Whatever an instruction reads was computed earlier on its rank, or is received and waited for; nothing else is
    received, and every send waits for the result that it sends."""
    _prove_sends(program)
    columns = program.columns
    reader, producer = data_dependencies(program)
    same_rank = columns.rank[reader] == columns.rank[producer]
    early = np.flatnonzero(same_rank & (columns.unit[producer] >= columns.unit[reader]))
    if len(early):
        k = early[np.argmin(reader[early])]
        text = f"{columns.key(reader[k])} reads {columns.key(producer[k])}, which does not come before it"
        raise error_at(program, reader[k], text)
    _prove_receives(program, reader[~same_rank], producer[~same_rank])


def _prove_sends(program: Program) -> None:
    """The first wait of a send is for the result that it sends."""
    columns = program.columns
    rows = columns.rows_of(IS_SEND)
    first = columns.wait_offsets[rows]
    right = first < columns.wait_offsets[rows + 1]  # it waits at all
    first = np.where(right, first, 0)
    if right.any():
        op = columns.wait_op[first]
        right &= np.where(columns.op[rows] == CODE[Op.SEND_F], op == _F, IS_BACKWARD[op])
        right &= columns.wait_stage[first] == columns.stage[rows]
        right &= columns.wait_microbatch[first] == columns.microbatch[rows]
    if not right.all():
        row = rows[np.argmin(right)]
        raise error_at(program, row, f"{columns.key(row)} does not wait first for the result it sends")


def _prove_receives(program: Program, reader: Array, producer: Array) -> None:
    """`reader[k]` reads what `producer[k]` computes on another rank."""
    columns, lookup = program.columns, program.lookup
    op = np.where(columns.op[producer] == _F, CODE[Op.RECV_F], CODE[Op.RECV_B])
    receive = lookup.rows(columns.rank[reader], op, columns.stage[reader], columns.microbatch[reader])
    same_stage = columns.stage[reader] == columns.stage[producer]  # another slice's keys and values: never sent
    waited = _waits_such_that(program, reader, lambda waits, k: lookup.wait_targets[waits] == receive[k])
    waited &= receive >= 0
    wrong = np.flatnonzero(same_stage | ~waited | (columns.peer[receive] != columns.rank[producer]))
    if len(wrong):
        k = wrong[np.argmin(reader[wrong])]
        raise _not_received(program, reader[k], producer[k], receive[k] if waited[k] else -1)
    unread = IS_RECEIVE[columns.op]
    unread[receive] = False
    if unread.any():
        row = int(np.argmax(unread))
        raise error_at(program, row, f"nothing reads what {columns.key(row)} receives")


def _not_received(program: Program, reader: int, producer: int, receive: int) -> ScheduleError:
    """Why `reader` does not get what `producer` computes; `receive` is the receive it waits for, or -1."""
    columns = program.columns
    source, key, result = columns.rank[producer], columns.key(reader), columns.key(producer)
    expected = key._replace(op=Op.RECV_F if result.op is Op.F else Op.RECV_B)
    if result.stage == key.stage:
        text = f"{key} reads {result} of rank {source}, but slices of one sequence stay together"
        return error_at(program, reader, text)
    if receive < 0:
        return error_at(program, reader, f"{key} reads {result} of rank {source} but does not wait for {expected}")
    text = f"{expected} receives from rank {columns.peer[receive]}, but {result} runs on rank {source}"
    return error_at(program, receive, text)


def prove_slots(program: Program) -> None:
    """A slot is received into again only after its last reader: B for an activation, W for a gradient."""
    columns, lookup = program.columns, program.lookup
    receives = columns.rows_of(IS_RECEIVE)
    if (columns.slot[receives] < 0).any():
        row = receives[np.argmax(columns.slot[receives] < 0)]
        raise error_at(program, row, f"{columns.key(row)} has no slot")
    slot = slot_numbers(program, receives)
    by_slot = np.argsort(slot, kind="stable")
    reused = np.flatnonzero(np.diff(slot[by_slot]) == 0)
    before, row = receives[by_slot[reused]], receives[by_slot[reused + 1]]
    forward, cell = columns.op[before] == CODE[Op.RECV_F], lookup.cell(before)
    reader = np.where(forward, lookup.backward[cell], lookup.weight[cell])
    wrong = np.flatnonzero(~waits_for_compute(program, row, reader))
    if len(wrong):
        k = wrong[np.argmin(row[wrong])]
        text = f"{columns.key(row[k])} refills slot {columns.slot[row[k]]}, which {columns.key(reader[k])} still reads"
        raise error_at(program, row[k], text)


def waits_for_compute(program: Program, rows: Array, compute: Array) -> Array:
    """Whether each row waits for its entry of `compute` or for a later compute unit.

    A later unit is needed if `compute[k]` is the second half of an overlapped pair and the wait names the first, which
    may end earlier.
    """
    columns, targets = program.columns, program.lookup.wait_targets

    def has_ended(waits: Array, k: Array) -> Array:
        target = targets[waits]
        later = IS_COMPUTE[columns.op[target]] & (columns.unit[target] > columns.unit[compute[k]])
        return (target == compute[k]) | later

    return _waits_such_that(program, rows, has_ended)


def _waits_such_that(program: Program, rows: Array, holds: Callable[[Array, Array], Array]) -> Array:
    """Whether each row has a wait for which `holds(waits, positions in rows)`; row -1 has none."""
    offsets = program.columns.wait_offsets
    counts = np.where(rows < 0, 0, offsets[rows + 1] - offsets[rows])
    k = np.repeat(np.arange(len(rows)), counts)
    waits = np.arange(len(k)) + np.repeat(offsets[rows] - counts.cumsum() + counts, counts)
    return np.bincount(k[holds(waits, k)], minlength=len(rows)) > 0
