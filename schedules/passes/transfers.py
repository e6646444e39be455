"""Pass: a SEND after every result that another rank needs, and a RECV where its sender is expected to be done."""

from __future__ import annotations

from dataclasses import replace
from heapq import heappop, heappush
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from pentad.schedules.ir.columns import CODE, OPS, Array, Columns, key_columns
from pentad.schedules.ir.instruction import Op
from pentad.schedules.ir.program import Program
from pentad.schedules.ir.rewrite import insert_rows
from pentad.schedules.simulate.costs import Costs
from pentad.schedules.simulate.dependencies import action_levels, action_times, compute_graph, data_dependencies

_F = CODE[Op.F]
_ALPHABETICAL = np.argsort(np.argsort([op.value for op in OPS]))  # rank of an op's name, by op code


class _Transfers(NamedTuple):
    """By transfer: rows of the compute that produces and consumes the tensor, and the action (numbered through all
    ranks) before which it is received. Sorted by that action, then by the time of sending."""

    producer: Array
    consumer: Array
    received_before: Array


def add_transfers(program: Program, costs: Costs, *, gated: bool, post_validation: bool = False) -> Program:
    """A program whose ranks exchange their results.

    According to `costs`, a RECV goes before the compute action during which its sender finishes, so that its slot is
    granted before the data comes. With `gated`, for transports whose waiting receives occupy the GPU (NCCL), it goes
    after that action and waits for it, so that it is launched once the data is there. With `post_validation`, both ends
    of a transfer are before the first backward of their ranks, or both are after it (see post_validation.py). Raises
    ScheduleError when the order cannot run.
    """
    columns = program.columns
    transfers = _plan_transfers(program, costs, gated=gated, post_validation=post_validation)
    sends, sent_before = _sends(columns, transfers)
    receives = _receives(program, transfers, gated=gated)
    waiting = columns.with_waits(transfers.consumer, receives.op, receives.stage, receives.microbatch)
    before = np.concatenate((sent_before, columns.row_before(transfers.received_before)))
    ranks = columns.rank[np.concatenate((np.sort(transfers.producer), transfers.consumer))]
    # Sends first: at the same place, the sends of the action before it come before receives.
    return program.with_streams(insert_rows(waiting, sends + receives, ranks, before))


def _plan_transfers(program: Program, costs: Costs, *, gated: bool, post_validation: bool) -> _Transfers:
    columns = program.columns
    consumer, producer = data_dependencies(program)
    remote = columns.rank[consumer] != columns.rank[producer]
    if remote.any():
        starts, ends = action_times(program, costs)
    else:  # nothing is sent: times do not matter, but cycles are still refused
        action_levels(program, compute_graph(program, costs))
        starts = ends = np.zeros(len(columns.action_row))
    consumer, producer = consumer[remote], producer[remote]
    source, target, sent = columns.rank[producer], columns.rank[consumer], ends[columns.action[producer]]
    before = np.empty(len(consumer), int)
    by_target = np.split(np.argsort(target, kind="stable"), np.bincount(target, minlength=columns.ranks).cumsum())
    for (first, end), received in zip(pairwise(columns.action_offsets), by_target, strict=False):
        before[received] = _due(starts[first:end], ends[first:end], sent[received], after=gated) + first
    late = np.zeros(len(consumer), bool)
    if post_validation:
        first_backward = columns.action[first_rows(columns, np.flatnonzero(columns.op != _F))]
        late = columns.action[producer] >= first_backward[source]
        limit = first_backward[target]
        before = np.where(late, np.maximum(before, limit), np.minimum(before, limit))
    name = source * len(OPS) + _ALPHABETICAL[columns.op[producer]]
    key = name * program.stages * program.total_slices + program.lookup.cell(producer)
    order = np.lexsort((key, sent, late, before))
    return _Transfers(producer[order], consumer[order], before[order])


def first_rows(columns: Columns, rows: Array) -> Array:
    """By rank: the first of these ascending rows that is its own; every rank must have one."""
    return rows[np.searchsorted(rows, columns.rank_offsets[:-1])]


def _due(starts: Array, ends: Array, sent: Array, *, after: bool) -> Array:
    """Index of the target's action before which to receive what is sent at these times: the action that runs then or,
    with `after`, the next one if an action runs then."""
    action = np.searchsorted(ends, sent, side="right")
    return action + (np.append(starts, np.inf)[action] < sent) if after else action


def _sends(columns: Columns, transfers: _Transfers) -> tuple[Columns, Array]:
    """Sends in the order of their producers, and the rows before which they go."""
    order = np.argsort(transfers.producer)
    producer, consumer = transfers.producer[order], transfers.consumer[order]
    op = np.where(columns.op[producer] == _F, CODE[Op.SEND_F], CODE[Op.SEND_B])
    rows = _rows(columns, producer, op, columns.rank[consumer], np.full(len(op), -1))
    sends = rows.with_waits(np.arange(len(op)), *columns.keys(producer))
    return sends, columns.row_before(columns.action[producer] + 1)


def _receives(program: Program, transfers: _Transfers, *, gated: bool) -> Columns:
    """Receives in the order of `transfers`. Each waits until the last reader of its slot's previous tensor is done: B
    (F in a forward-only program) is the last reader of an activation, W that of a gradient."""
    columns, lookup = program.columns, program.lookup
    is_forward = columns.op[transfers.producer] == _F
    cell = lookup.cell(transfers.consumer)
    reader = np.where(is_forward, lookup.activation_reader[cell], lookup.weight[cell])
    pool = 2 * columns.rank[transfers.consumer] + is_forward
    slot, previous = _assign_slots(pool, transfers.received_before, columns.action[reader])
    op = np.where(is_forward, CODE[Op.RECV_F], CODE[Op.RECV_B])
    receives = _rows(columns, transfers.consumer, op, columns.rank[transfers.producer], slot)
    reused = np.flatnonzero(previous >= 0)
    previous_reader = np.full(len(op), -1)
    previous_reader[reused] = reader[previous[reused]]
    receives = receives.with_waits(reused, *columns.keys(previous_reader[reused]))
    if not gated:
        return receives
    first_action = columns.action_offsets[columns.rank[transfers.consumer]]
    later = np.flatnonzero(transfers.received_before > first_action)
    gate = columns.row_before(transfers.received_before[later]) - 1  # the last row of the action before
    more = gate != previous_reader[later]
    return receives.with_waits(later[more], *columns.keys(gate[more]))


def _rows(columns: Columns, rows: Array, op: Array, peer: Array, slot: Array) -> Columns:
    """Instructions with the stage and microbatch of these rows, without waits."""
    keys = key_columns(np.array([0, len(rows)]), op, columns.stage[rows], columns.microbatch[rows])
    return replace(keys, peer=peer.astype(np.int32), slot=slot.astype(np.int32))


def _assign_slots(pools: Array, received_before: Array, last_read: Array) -> tuple[Array, Array]:
    """By receive: the lowest slot of its pool that is free before action `received_before`, and the receive that used
    the slot before (-1: none). A slot becomes free after action `last_read`."""
    count = len(pools)
    # All events of a pool in order: event k < count is receive k taking a slot, event count + k its release.
    times = np.concatenate((2 * received_before + 1, 2 * (last_read + 1)))
    horizon = times.max(initial=0) + 1
    events = np.argsort(np.concatenate((pools, pools)) * horizon + times, kind="stable").tolist()
    slots, previous = [0] * count, [-1] * count
    for first, end in pairwise(np.concatenate(([0], 2 * np.bincount(pools).cumsum())).tolist()):
        free: list[int] = []
        users: list[int] = []  # by slot: the receive that used it last
        for event in events[first:end]:
            if event >= count:
                heappush(free, slots[event - count])
            elif free:
                slots[event] = slot = heappop(free)
                previous[event], users[slot] = users[slot], event
            else:
                slots[event] = len(users)
                users.append(event)
    return np.array(slots, int), np.array(previous, int)
