"""The part of a program's proof that follows the data: waits, what is sent and received, and the slots that hold it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from pentad.schedules.ir.columns import CODE, Array
from pentad.schedules.ir.instruction import Op
from pentad.schedules.ir.lookup import IS_BACKWARD, IS_COMPUTE, IS_RECEIVE, IS_SEND
from pentad.schedules.ir.program import Program
from pentad.schedules.simulate.dependencies import ScheduleError, reads

_F = CODE[Op.F]


def prove_waits(program: Program) -> None:
    columns, waited = program.columns, program.lookup.waited
    late = columns.unit[waited] >= columns.unit[columns.wait_row]
    wrong = np.flatnonzero((waited < 0) | late)
    if len(wrong):
        rank, at = columns.place(columns.wait_row[wrong[0]])
        how = "is not in its stream" if waited[wrong[0]] < 0 else "comes after it"
        text = f"{program.streams[rank][at].key} waits for {columns.wait_key(wrong[0])}, which {how}"
        raise ScheduleError(f"rank {rank}: {text}", rank, at)


def prove_data(program: Program) -> None:
    """Every result that an instruction reads was made on this rank before, or is waited for as a receive; every
    receive is of such a result."""
    _prove_sends(program)
    columns = program.columns
    reader, made = reads(program)
    here = columns.rank[reader] == columns.rank[made]
    early = np.flatnonzero(here & (columns.unit[made] >= columns.unit[reader]))
    if len(early):
        k = early[np.argmin(reader[early])]
        text = f"{columns.key(reader[k])} reads {columns.key(made[k])}, which does not come before it"
        raise _at(program, reader[k], text)
    _prove_receives(program, reader[~here], made[~here])


def _prove_sends(program: Program) -> None:
    columns = program.columns
    rows = columns.rows_of(IS_SEND)
    first = columns.wait_first[rows]
    right = first < columns.wait_first[rows + 1]
    first = np.where(right, first, 0)
    if right.any():
        op = columns.wait_op[first]
        forward = columns.op[rows] == CODE[Op.SEND_F]
        right &= np.where(forward, op == _F, IS_BACKWARD[op])
        right &= columns.wait_stage[first] == columns.stage[rows]
        right &= columns.wait_microbatch[first] == columns.microbatch[rows]
    if not right.all():
        row = rows[np.argmin(right)]
        raise _at(program, row, f"{columns.key(row)} does not wait first for the result it sends")


def _prove_receives(program: Program, reader: Array, made: Array) -> None:
    """`reader` reads what is `made` on another rank."""
    columns, rows = program.columns, program.lookup
    forward = columns.op[made] == _F
    op = np.where(forward, CODE[Op.RECV_F], CODE[Op.RECV_B])
    expected = rows.rows(columns.rank[reader], op, columns.stage[reader], columns.microbatch[reader])
    other = columns.stage[reader] == columns.stage[made]  # a slice's keys and values go nowhere
    awaited = _awaits(program, reader, lambda waits, k: rows.waited[waits] == expected[k]) & (expected >= 0)
    wrong = np.flatnonzero(other | ~awaited | (columns.peer[expected] != columns.rank[made]))
    if len(wrong):
        k = wrong[np.argmin(reader[wrong])]
        raise _unreceived(program, reader[k], made[k], expected[k] if awaited[k] else -1)
    unread = IS_RECEIVE[columns.op]
    unread[expected] = False
    if unread.any():
        row = int(np.argmax(unread))
        raise _at(program, row, f"nothing reads what {columns.key(row)} receives")


def _unreceived(program: Program, reader: int, made: int, receive: int) -> ScheduleError:
    """What is wrong with how `reader` gets the result of another rank; `receive` is what it waits for, or -1."""
    columns = program.columns
    source, key, result = columns.rank[made], columns.key(reader), columns.key(made)
    expected = key._replace(op=Op.RECV_F if result.op is Op.F else Op.RECV_B)
    if result.stage == key.stage:
        return _at(program, reader, f"{key} reads {result} of rank {source}, but slices of one sequence stay together")
    if receive < 0:
        return _at(program, reader, f"{key} reads {result} of rank {source} but does not wait for {expected}")
    text = f"{expected} receives from rank {columns.peer[receive]}, but {result} runs on rank {source}"
    return _at(program, receive, text)


def prove_slots(program: Program) -> None:
    """A slot is granted again only behind the last reader of what it held: B of an activation, W of a gradient."""
    columns, rows = program.columns, program.lookup
    receives = columns.rows_of(IS_RECEIVE)
    if (columns.slot[receives] < 0).any():
        row = receives[np.argmax(columns.slot[receives] < 0)]
        raise _at(program, row, f"{columns.key(row)} has no slot")
    forward = columns.op[receives] == CODE[Op.RECV_F]
    pool = (2 * columns.rank[receives] + forward) * 2**32 + columns.slot[receives]
    by_pool = np.argsort(pool, kind="stable")
    again = np.flatnonzero(np.diff(pool[by_pool]) == 0)
    row, before = receives[by_pool[again + 1]], rows.cell(receives[by_pool[again]])
    reader = np.where(forward[by_pool[again]], rows.backward[before], rows.weight[before])
    kept = np.flatnonzero(~behind(program, row, reader))
    if len(kept):
        k = kept[np.argmin(row[kept])]
        text = f"{columns.key(row[k])} refills slot {columns.slot[row[k]]}, which {columns.key(reader[k])} still reads"
        raise _at(program, row[k], text)


def behind(program: Program, rows: Array, last: Array) -> Array:
    """Whether each row waits for compute up to `last`, which ends an overlapped pair if it is of one: the forward of a
    pair may end before its backward does."""
    columns, waited = program.columns, program.lookup.waited

    def ended(waits: Array, k: Array) -> Array:
        found = waited[waits]
        later = IS_COMPUTE[columns.op[found]] & (columns.unit[found] > columns.unit[last[k]])
        return (found == last[k]) | later

    return _awaits(program, rows, ended)


def _awaits(program: Program, rows: Array, holds: Callable[[Array, Array], Array]) -> Array:
    """Whether one wait of each row is such that `holds(waits, positions in rows)`; none is of row -1."""
    first = program.columns.wait_first
    counts = np.where(rows < 0, 0, first[rows + 1] - first[rows])
    k = np.repeat(np.arange(len(rows)), counts)
    waits = np.arange(len(k)) + np.repeat(first[rows] - counts.cumsum() + counts, counts)
    return np.bincount(k[holds(waits, k)], minlength=len(rows)) > 0


def _at(program: Program, row: int, text: str) -> ScheduleError:
    rank, at = program.columns.place(row)
    return ScheduleError(f"rank {rank}: {text}", rank, at)
