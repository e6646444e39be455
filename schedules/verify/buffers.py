"""Every buffer of a step: which instruction fills it, which reads it last, and where it is free again.

Four kinds. *saved*: what a forward keeps until its backward. *deferred*: what B keeps until W. *result*: what goes to
another stage, until that has it here or, of one that is sent, until the next send of its lane, since a lane sends one
after another. *slot*: what a receive fills, until the next receive of that slot.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from pentad.schedules.ir.columns import CODE, Array
from pentad.schedules.ir.instruction import Op
from pentad.schedules.ir.lookup import IS_BACKWARD, IS_RECEIVE
from pentad.schedules.ir.program import Program
from pentad.schedules.simulate.dependencies import ScheduleError
from pentad.schedules.simulate.events import following

KINDS = ("saved", "deferred", "result", "slot")
SAVED, DEFERRED, RESULT, SLOT = range(4)


class Buffers(NamedTuple):
    """Rows of the program: the k-th buffer is of kind `KINDS[kind[k]]`, filled by made[k], read last by used[k] (-1: by
    none), and free behind freed[k] (-1: at the end of the step)."""

    kind: Array
    made: Array
    used: Array
    freed: Array


@dataclass(frozen=True)
class Sizes:
    """Bytes of a tensor that moves between stages and, by stage, of what F keeps of a piece until B, of what B keeps of
    it until W, and of what is there all the time (parameters, gradients, optimizer state)."""

    transfer: int
    saved: tuple[int, ...]
    deferred: tuple[int, ...]
    fixed: tuple[int, ...]


def buffers(program: Program) -> Buffers:
    """Of a program whose instructions are unique and complete (see `check`)."""
    columns, rows = program.columns, program.lookup
    f, b = np.flatnonzero(columns.op == CODE[Op.F]), np.flatnonzero(columns.op == CODE[Op.B])
    made, used, freed = _results(program)
    receives = columns.rows_of(IS_RECEIVE)
    forward = columns.op[receives] == CODE[Op.RECV_F]
    reader = np.where(forward, rows.backward[rows.cell(receives)], rows.weight[rows.cell(receives)])
    pool = (2 * columns.rank[receives] + forward) * 2**32 + columns.slot[receives]
    f, saved = _saved(program, f)
    deferred = rows.weight[rows.cell(b)]
    kind = np.repeat(range(4), [len(f), len(b), len(made), len(receives)])
    every = [(f, saved, saved), (b, deferred, deferred), (made, used, freed)]
    every.append((receives, reader, _next(columns.rows, receives, pool)[receives]))
    return Buffers(kind, *map(np.concatenate, zip(*every, strict=True)))


def _saved(program: Program, forward: Array) -> tuple[Array, Array]:
    """Who makes what a backward needs, and who ends it: the forward or what does it again, and, of what is offloaded
    meanwhile, once before its way and once behind it."""
    columns, rows = program.columns, program.lookup
    made = forward.copy()
    ends = rows.backward[rows.cell(forward)]
    for op, changed in ((Op.RECOMPUTE, made), (Op.OFFLOAD, ends)):
        found = rows.rows(columns.rank[forward], CODE[op], columns.stage[forward], columns.microbatch[forward])
        changed[found >= 0] = found[found >= 0]
    back = np.flatnonzero(columns.op == CODE[Op.RELOAD])
    return np.concatenate((made, back)), np.concatenate((ends, rows.backward[rows.cell(back)]))


def prove_buffers(program: Program) -> None:
    """Raises ScheduleError for a buffer that is read by none, or before it is filled, or behind where it is free."""
    columns = program.columns
    kind, made, used, freed = buffers(program)
    end = np.where(freed < 0, columns.first[columns.rank[made] + 1] - 1, freed)
    rank = columns.rank[made]
    apart = (rank != columns.rank[used]) | (rank != columns.rank[end])
    reached = np.where(kind == SLOT, columns.unit[made], columns.unit[made] + 1)  # a slot is filled beside compute
    wrong = np.flatnonzero(
        (used < 0) | apart | (columns.unit[used] < reached) | (columns.unit[end] < columns.unit[used])
    )
    if len(wrong):
        k = wrong[np.argmin(made[wrong])]
        what = f"the {KINDS[kind[k]]} buffer of {columns.key(made[k])}"
        reads = f"is read last by {columns.key(used[k])}" if used[k] >= 0 else "is read by none"
        frees = "at the end of the step" if freed[k] < 0 else f"behind {columns.key(freed[k])}"
        at, index = columns.place(made[k])
        raise ScheduleError(f"rank {at}: {what} {reads} and free {frees}", at, index)


def peak_bytes(program: Program, sizes: Sizes) -> list[int]:
    """Most bytes that each rank holds at once, counted along its stream. A B trades what F kept for what W needs; a BW
    does so for its own time. All slots of a rank are there for the whole step."""
    columns = program.columns
    kind, made, _, freed = buffers(program)
    saved, deferred = (np.array(part, np.int64)[columns.stage] for part in (sizes.saved, sizes.deferred))
    size = np.select(
        [kind == SAVED, kind == DEFERRED, kind == RESULT], [saved[made], deferred[made], sizes.transfer], 0
    )
    # Two moments a row: what is taken before it, and what is given back behind it. What B trades is no sum of both.
    change = np.zeros(2 * columns.rows, np.int64)
    np.add.at(change, 2 * made, size)
    behind = freed >= 0
    at_once = columns.op[freed] == CODE[Op.B]
    np.add.at(change, (2 * freed + ~((kind == SAVED) & at_once))[behind], -size[behind])
    both = np.flatnonzero(columns.op == CODE[Op.BW])
    change[2 * both] += np.maximum(deferred[both] - saved[both], 0)
    change[2 * both + 1] -= np.maximum(deferred[both] - saved[both], 0)
    slots = _slots(program)
    peaks = []
    for rank, (a, b) in enumerate(pairwise(columns.first.tolist())):
        most = int(np.max(np.cumsum(change[2 * a : 2 * b]), initial=0))
        fixed = sum(sizes.fixed[stage] for stage in dict.fromkeys(program.placement[rank]))
        peaks.append(fixed + int(slots[rank]) * sizes.transfer + most)
    return peaks


def _results(program: Program) -> tuple[Array, Array, Array]:
    """Results that another stage reads: who makes them, who uses them last here, and where they are free."""
    columns, rows, pieces = program.columns, program.lookup, program.pieces
    f = np.flatnonzero((columns.op == CODE[Op.F]) & (columns.stage + 1 < program.stages))
    b = np.flatnonzero(IS_BACKWARD[columns.op] & (columns.stage > 0))
    made = np.concatenate((f, b))
    reader = np.concatenate((rows.forward[rows.cell(f) + pieces], rows.backward[rows.cell(b) - pieces]))
    here = columns.rank[reader] == columns.rank[made]
    op = np.repeat([CODE[Op.SEND_F], CODE[Op.SEND_B]], [len(f), len(b)])
    send = rows.rows(columns.rank[made], op, columns.stage[made], columns.microbatch[made])
    after = _next(columns.rows, rows.transfers[0], rows.channels[0])
    # What is both read here and sent, or neither, has no one end.
    used = np.where(here, np.where(send < 0, reader, -1), send)
    return made, used, np.where(here, used, after[used])


def _next(count: int, rows: Array, group: Array) -> Array:
    """By row: the next row of its group, -1 where there is none."""
    found = np.full(count, -1)
    before, after = following(rows, group)
    found[before] = after
    return found


def _slots(program: Program) -> Array:
    """Receive slots of each rank."""
    columns = program.columns
    rows = columns.rows_of(IS_RECEIVE)
    forward = columns.op[rows] == CODE[Op.RECV_F]
    pools = np.unique((2 * columns.rank[rows] + forward) * 2**32 + columns.slot[rows])
    return np.bincount(pools // 2**33, minlength=program.ranks)
