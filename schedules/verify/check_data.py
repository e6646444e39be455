"""The part of the proof that follows the data: waits, sends, receives, and the slots that receives fill."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from pentad.schedules.ir.columns import CODE, Array
from pentad.schedules.ir.errors import ScheduleError
from pentad.schedules.ir.instruction import Op
from pentad.schedules.ir.lookup import IS_COMPUTE, IS_RECEIVE, IS_SEND
from pentad.schedules.ir.program import Program
from pentad.schedules.simulate.dependencies import data_dependencies
from pentad.schedules.simulate.events import consecutive
from pentad.schedules.verify.buffers import slot_numbers
from pentad.schedules.verify.check_order import error_at, refuse

_F = CODE[Op.F]


def prove_waits(program: Program) -> None:
    """Every wait names an earlier instruction of the same stream."""
    columns, targets = program.columns, program.lookup.wait_targets

    def text(wait: int) -> str:
        action = columns.action[columns.wait_row[wait]]
        how = "is not in its stream" if targets[wait] < 0 else "comes after it"
        return f"{columns.key(columns.action_row[action])} waits for {columns.wait_key(wait)}, which {how}"

    late = (targets < 0) | (columns.action[targets] >= columns.action[columns.wait_row])
    refuse(program, columns.wait_row, late, text)


def prove_data(program: Program) -> None:
    """Whatever an instruction reads was computed earlier on its rank, or is received and waited for; nothing else is
    received, and every send waits for the result that it sends."""
    _prove_sends(program)
    columns, key = program.columns, program.columns.key
    reader, producer = data_dependencies(program)
    same_rank = columns.rank[reader] == columns.rank[producer]
    late = same_rank & (columns.action[producer] >= columns.action[reader])
    refuse(program, reader, late, lambda k: f"{key(reader[k])} reads {key(producer[k])}, which does not come before it")
    _prove_receives(program, reader[~same_rank], producer[~same_rank])


def _prove_sends(program: Program) -> None:
    """The first wait of a send is for the result that it sends."""
    columns, lookup = program.columns, program.lookup
    rows = columns.rows_of(IS_SEND)
    cell = lookup.cell(rows)
    result = np.where(columns.op[rows] == CODE[Op.SEND_F], lookup.forward[cell], lookup.backward[cell])

    def is_first_for_result(waits: Array, k: Array) -> Array:
        return (waits == columns.wait_offsets[rows[k]]) & (lookup.wait_targets[waits] == result[k])

    right = _waits_such_that(program, rows, is_first_for_result)
    refuse(program, rows, ~right, lambda k: f"{columns.key(rows[k])} does not wait first for the result it sends")


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
    rows, unread = np.arange(columns.rows), IS_RECEIVE[columns.op]
    unread[receive] = False
    refuse(program, rows, unread, lambda row: f"nothing reads what {columns.key(row)} receives")


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
    """A slot is received into again only after its last reader: W for a gradient, B for an activation (F, if there is
    no B)."""
    columns, lookup = program.columns, program.lookup
    receives = columns.rows_of(IS_RECEIVE)
    refuse(program, receives, columns.slot[receives] < 0, lambda k: f"{columns.key(receives[k])} has no slot")
    before, row = consecutive(receives, slot_numbers(program, receives))
    forward, cell = columns.op[before] == CODE[Op.RECV_F], lookup.cell(before)
    reader = np.where(forward, lookup.activation_reader[cell], lookup.weight[cell])

    def text(k: int) -> str:
        slot = columns.slot[row[k]]
        return f"{columns.key(row[k])} refills slot {slot}, which {columns.key(reader[k])} still reads"

    refuse(program, row, ~waits_for_compute(program, row, reader), text)


def waits_for_compute(program: Program, rows: Array, compute: Array) -> Array:
    """Whether each row waits for its entry of `compute` or for a later compute action.

    A later action is needed if `compute[k]` is the second half of an overlapped pair and the wait names the first,
    which may end earlier.
    """
    columns, targets = program.columns, program.lookup.wait_targets

    def has_ended(waits: Array, k: Array) -> Array:
        target = targets[waits]
        later = IS_COMPUTE[columns.op[target]] & (columns.action[target] > columns.action[compute[k]])
        return (target == compute[k]) | later

    return _waits_such_that(program, rows, has_ended)


def _waits_such_that(program: Program, rows: Array, holds: Callable[[Array, Array], Array]) -> Array:
    """Whether each row has a wait for which `holds(waits, positions in rows)` is true; row -1 has none."""
    offsets = program.columns.wait_offsets
    counts = np.where(rows < 0, 0, offsets[rows + 1] - offsets[rows])
    k = np.repeat(np.arange(len(rows)), counts)
    waits = np.arange(len(k)) + np.repeat(offsets[rows] - counts.cumsum() + counts, counts)
    return np.bincount(k[holds(waits, k)], minlength=len(rows)) > 0
