"""The lifetime of every buffer of a step: what fills it, what reads it last, and when it is free again.

There are four kinds. *saved*: the activations that a forward saves for its backward, if it has one. *deferred*: what B
saves for W. *result*: an output for another stage. If that stage is on the same rank it is free once read; if it is
sent it is free at the next send of the same lane, as a lane runs its sends one after another. *slot*: received data,
until the next receive into the same slot.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pentad.schedules.ir.columns import CODE, Array
from pentad.schedules.ir.instruction import Op
from pentad.schedules.ir.lookup import IS_BACKWARD, IS_RECEIVE
from pentad.schedules.ir.program import Program
from pentad.schedules.simulate.events import consecutive
from pentad.schedules.verify.check_order import refuse

KINDS = ("saved", "deferred", "result", "slot")


class Buffers(NamedTuple):
    """Buffer k is of kind `KINDS[kind[k]]`; the rest are rows of the program. `last_read` is -1 for a buffer that is
    never read, `freed` is -1 for one that is freed at the end of the step."""

    kind: Array
    filled: Array
    last_read: Array
    freed: Array


def buffers(program: Program) -> Buffers:
    """The buffers of a program whose instructions are unique and complete (see `check`)."""
    columns, rows = program.columns, program.lookup
    b = np.flatnonzero(columns.op == CODE[Op.B])
    w = rows.weight[rows.cell(b)]
    saved, saved_end = _saved(program)
    result, result_read, result_freed = _results(program)
    slot = columns.rows_of(IS_RECEIVE)
    forward = columns.op[slot] == CODE[Op.RECV_F]
    slot_read = np.where(forward, rows.activation_reader[rows.cell(slot)], rows.weight[rows.cell(slot)])
    slot_freed = _next(columns.rows, slot, slot_numbers(program, slot))[slot]
    return Buffers(
        np.repeat(range(4), [len(saved), len(b), len(result), len(slot)]),
        np.concatenate((saved, b, result, slot)),
        np.concatenate((saved_end, w, result_read, slot_read)),
        np.concatenate((saved_end, w, result_freed, slot_freed)),
    )


def slot_numbers(program: Program, receives: Array) -> Array:
    """A number for the slot that each of these rows fills, the same for rows of one rank, op and slot."""
    columns = program.columns
    pool = 2 * columns.rank[receives] + (columns.op[receives] == CODE[Op.RECV_F])
    return pool * (int(columns.slot.max(initial=0)) + 1) + columns.slot[receives]


def prove_buffers(program: Program) -> None:
    """Raises ScheduleError for a buffer that is never read, or read before it is filled or after it is freed."""
    columns = program.columns
    kind, filled, last_read, freed = buffers(program)
    rank = columns.rank[filled]
    end = np.where(freed < 0, columns.rank_offsets[rank + 1] - 1, freed)
    other_rank = (rank != columns.rank[last_read]) | (rank != columns.rank[end])
    early, late = columns.action[last_read] <= columns.action[filled], columns.action[end] < columns.action[last_read]

    def text(k: int) -> str:
        read = f"last read by {columns.key(last_read[k])}" if last_read[k] >= 0 else "never read"
        free = "at the end of the step" if freed[k] < 0 else f"after {columns.key(freed[k])}"
        return f"the {KINDS[kind[k]]} buffer of {columns.key(filled[k])} is {read} and freed {free}"

    refuse(program, filled, (last_read < 0) | other_rank | early | late, text)


def _saved(program: Program) -> tuple[Array, Array]:
    """(filled, freed) of saved activations: from the forward or its recomputation to the backward. An offloaded one has
    two buffers, from the forward to OFFLOAD and from RELOAD to the backward or to the recomputation that reads it."""
    columns, rows = program.columns, program.lookup
    filled = np.flatnonzero(columns.op == CODE[Op.F])
    if program.forward_only:
        filled = filled[:0]
    backward = rows.backward[rows.cell(filled)]
    keys = columns.rank[filled], columns.stage[filled], columns.microbatch[filled]
    recompute, offload, reload = (
        rows.rows(keys[0], CODE[op], *keys[1:]) for op in (Op.RECOMPUTE, Op.OFFLOAD, Op.RELOAD)
    )
    is_away, again = (offload >= 0) & (reload >= 0), recompute >= 0
    on_device = ~is_away | again
    return (
        np.concatenate((np.where(again, recompute, filled)[on_device], filled[is_away], reload[is_away])),
        np.concatenate((backward[on_device], offload[is_away], np.where(again, recompute, backward)[is_away])),
    )


def _results(program: Program) -> tuple[Array, Array, Array]:
    """(filled, last read, freed) of outputs and input gradients that another stage reads."""
    columns, rows, step = program.columns, program.lookup, program.total_slices
    f = np.flatnonzero((columns.op == CODE[Op.F]) & (columns.stage + 1 < program.stages))
    b = np.flatnonzero(IS_BACKWARD[columns.op] & (columns.stage > 0))
    filled = np.concatenate((f, b))
    reader = np.concatenate((rows.forward[rows.cell(f) + step], rows.backward[rows.cell(b) - step]))
    same_rank = columns.rank[reader] == columns.rank[filled]
    op = np.repeat([CODE[Op.SEND_F], CODE[Op.SEND_B]], [len(f), len(b)])
    send = rows.rows(columns.rank[filled], op, columns.stage[filled], columns.microbatch[filled])
    next_send = _next(columns.rows, rows.transfers[0], rows.channels[0])
    # A result must be either read on its rank or sent: both would free it twice.
    read = np.where(same_rank, np.where(send < 0, reader, -1), send)
    return filled, read, np.where(same_rank, read, next_send[read])


def _next(count: int, rows: Array, group: Array) -> Array:
    """By row, the next row of the same group, or -1."""
    found = np.full(count, -1)
    before, after = consecutive(rows, group)
    found[before] = after
    return found
