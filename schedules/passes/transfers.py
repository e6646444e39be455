"""Pass: puts a SEND after every result another rank needs, and a RECV where that sender is due."""

from __future__ import annotations

from dataclasses import replace
from heapq import heappop, heappush
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from pentad.schedules.ir.columns import CODE, OPS, Array, Columns
from pentad.schedules.ir.instruction import Op
from pentad.schedules.ir.program import Program
from pentad.schedules.ir.rewrite import woven
from pentad.schedules.simulate.costs import Costs
from pentad.schedules.simulate.dependencies import reads, unit_times

_F = CODE[Op.F]
_NAMES = np.argsort(np.argsort([op.value for op in OPS]))  # place of an op by its name


class _Moves(NamedTuple):
    """Tensors that go from a rank to another: rows of the compute that makes and uses them, and, in units counted
    through all ranks, that before which the receive stands. Sorted by that, then by when they are sent."""

    made: Array
    used: Array
    place: Array


def add_transfers(program: Program, costs: Costs, *, gated: bool, validated: bool = False) -> Program:
    """A program whose ranks exchange what they compute.

    A RECV stands before the compute unit during which its sender is due, so that its slot is granted before the data
    comes. With `gated` (transports whose receive occupies the GPU while it waits, such as NCCL) it stands after that
    unit and waits for it: it is launched when the data is there. With `validated` both ends of a transfer stand before
    the first backward of their ranks, or behind it (see validation.py). Raises ScheduleError when the order cannot run.
    """
    columns = program.columns
    moves = _moves(program, costs, gated=gated, validated=validated)
    forward = columns.op[moves.made] == _F
    sends, sent_at = _sends(columns, moves)
    receives = _receives(program, moves, forward, gated=gated)
    arrives = columns.waiting(moves.used, receives.op, receives.stage, receives.microbatch)
    places = np.concatenate((sent_at, np.append(columns.unit_row, columns.rows)[moves.place]))
    ranks = columns.rank[np.concatenate((np.sort(moves.made), moves.used))]
    # Of one place, the sends of the unit before it come first.
    return program.with_columns(woven(arrives, sends + receives, ranks, places))


def _moves(program: Program, costs: Costs, *, gated: bool, validated: bool) -> _Moves:
    columns = program.columns
    starts, ends = unit_times(program, costs)
    used, made = reads(program)
    away = columns.rank[used] != columns.rank[made]
    used, made = used[away], made[away]
    source, target, sent = columns.rank[made], columns.rank[used], ends[columns.unit[made]]
    place = np.empty(len(used), int)
    by_target = np.split(np.argsort(target, kind="stable"), np.bincount(target, minlength=columns.ranks).cumsum())
    for (a, b), mine in zip(pairwise(columns.unit_first), by_target, strict=False):
        place[mine] = _due(starts[a:b], ends[a:b], sent[mine], after=gated) + a
    late = np.zeros(len(used), bool)
    if validated:
        opening = _first_backwards(columns)
        late = columns.unit[made] >= opening[source]
        place = np.where(late, np.maximum(place, opening[target]), np.minimum(place, opening[target]))
    first = (source * len(OPS) + _NAMES[columns.op[made]]) * program.stages * program.pieces + program.lookup.cell(made)
    order = np.lexsort((first, sent, late, place))
    return _Moves(made[order], used[order], place[order])


def _first_backwards(columns: Columns) -> Array:
    """Unit of every rank with its first instruction that is no forward."""
    rows = np.flatnonzero(columns.op != _F)
    return columns.unit[rows[np.searchsorted(rows, columns.first[:-1])]]


def _due(starts: Array, ends: Array, sent: Array, *, after: bool) -> Array:
    """Position in the target's stream of the unit during which (after: behind which) the sender is due."""
    place = np.searchsorted(ends, sent, side="right")
    return place + (np.append(starts, np.inf)[place] < sent) if after else place


def _sends(columns: Columns, moves: _Moves) -> tuple[Columns, Array]:
    """Sends in the order of the rows that make what they send, and the rows before which they stand."""
    by_made = np.argsort(moves.made)
    made, used = moves.made[by_made], moves.used[by_made]
    op = np.where(columns.op[made] == _F, CODE[Op.SEND_F], CODE[Op.SEND_B])
    rows = _rows(columns, made, op, columns.rank[used], np.full(len(op), -1))
    sends = rows.waiting(np.arange(len(op)), *columns.keys(made))
    return sends, np.append(columns.unit_row, columns.rows)[columns.unit[made] + 1]


def _receives(program: Program, moves: _Moves, forward: Array, *, gated: bool) -> Columns:
    """Receives, each with a slot that its last reader has left by then: an activation is read until B, a gradient until
    W."""
    columns, rows = program.columns, program.lookup
    cell = rows.cell(moves.used)
    reader = np.where(forward, rows.backward[cell], rows.weight[cell])
    pool = 2 * columns.rank[moves.used] + forward
    slot, before = _slots(pool, moves.place, columns.unit[reader])
    op = np.where(forward, CODE[Op.RECV_F], CODE[Op.RECV_B])
    found = _rows(columns, moves.used, op, columns.rank[moves.made], slot)
    again = np.flatnonzero(before >= 0)
    left = np.full(len(op), -1)
    left[again] = reader[before[again]]
    found = found.waiting(again, *columns.keys(left[again]))
    if not gated:
        return found
    late = np.flatnonzero(moves.place > columns.unit_first[columns.rank[moves.used]])
    gate = np.append(columns.unit_row, columns.rows)[moves.place[late]] - 1  # the last row of the unit before
    late, gate = late[gate != left[late]], gate[gate != left[late]]
    return found.waiting(late, *columns.keys(gate))


def _rows(like: Columns, rows: Array, op: Array, peer: Array, slot: Array) -> Columns:
    """Instructions with the stage and microbatch of others, without waits."""
    bare = like.bare(np.array([0, len(rows)]), rows)
    peer, slot = peer.astype(np.int32), slot.astype(np.int32)
    return replace(bare, op=op.astype(np.int8), peer=peer, slot=slot, second=np.zeros(len(rows), bool))


def _slots(pools: Array, places: Array, leaves: Array) -> tuple[Array, Array]:
    """The lowest slot of its pool that is free at its place for each receive, and the one that had it before (-1: none
    had). A slot is free at the places behind the unit that reads it last."""
    count = len(pools)
    # All that happens in a pool, in order: a receive takes a slot, and gives it back when it has been read.
    moments = np.concatenate((2 * places + 1, 2 * (leaves + 1)))
    later = moments.max(initial=0) + 1
    happens = np.argsort(np.concatenate((pools, pools)) * later + moments, kind="stable").tolist()
    slots, befores = [0] * count, [-1] * count
    for first, end in pairwise(np.concatenate(([0], 2 * np.bincount(pools).cumsum())).tolist()):
        idle: list[int] = []
        holders: list[int] = []  # by slot
        for event in happens[first:end]:
            if event >= count:
                heappush(idle, slots[event - count])
            elif idle:
                slots[event] = slot = heappop(idle)
                befores[event], holders[slot] = holders[slot], event
            else:
                slots[event] = len(holders)
                holders.append(event)
    return np.array(slots, int), np.array(befores, int)
