"""Where the instructions of a program stand: rows of its columns by what names them."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from pentad.schedules.ir.columns import OPS, Array, Columns, among
from pentad.schedules.ir.instruction import COMPUTE, RECEIVES, REDUCTIONS, SENDS, Op

IS_COMPUTE = among(COMPUTE)
IS_FORWARD = among({Op.F})
IS_BACKWARD = among({Op.B, Op.BW})
IS_WEIGHT = among({Op.W, Op.BW})
IS_REDUCTION = among(REDUCTIONS)
_NUMBERED = IS_REDUCTION | among({Op.ALL_GATHER, Op.FREE})
IS_SEND, IS_RECEIVE = among(SENDS), among(RECEIVES)
_FORWARD = among({Op.SEND_F, Op.RECV_F})


class Lookup:
    """Row numbers, -1 where there is none; the first one where a rank has a key twice.

    Every (rank, stage it holds) is a *holding*, and so is (rank, -1) for what is of no stage. Rows of other stages, or
    of microbatches that there are none of, are not found.
    """

    def __init__(self, columns: Columns, placement: tuple[tuple[int, ...], ...], stages: int, pieces: int) -> None:
        self.columns, self.stages, self.pieces = columns, stages, pieces
        found = columns.microbatch[columns.rows_of(_NUMBERED)]
        # What is gathered has a number of its turn for a microbatch, and what is reduced one of its bucket; a program
        # has fewer of them than rows.
        self.numbers = max(pieces, int(found[found < columns.rows].max(initial=-1)) + 1)
        held = [rank * (stages + 1) + stage + 1 for rank, own in enumerate(placement) for stage in (-1, *own)]
        self._holdings = np.unique(np.array(held))

    def holding(self, rank: Array, stage: Array) -> Array:
        """Number of the holding of each (rank, stage); -1 where a rank does not hold a stage."""
        expected = rank * (self.stages + 1) + stage + 1
        found = np.searchsorted(self._holdings, expected)
        found[found == len(self._holdings)] = 0
        known = (self._holdings[found] == expected) & (stage >= -1) & (stage < self.stages)
        return np.where(known, found, -1)

    @cached_property
    def ids(self) -> Array:
        """What names each row inside its rank, as a number; that behind the last for what cannot be found."""
        columns = self.columns
        return self._ids(columns.rank, columns.op, columns.stage, columns.microbatch)

    @cached_property
    def waited(self) -> Array:
        """The row that each wait is for."""
        columns = self.columns
        rank = columns.rank[columns.wait_row]
        return self.table[self._ids(rank, columns.wait_op, columns.wait_stage, columns.wait_microbatch)]

    @cached_property
    def table(self) -> Array:
        """Row by id."""
        table = np.full(len(self._holdings) * len(OPS) * (self.numbers + 1) + 1, -1, np.int32)
        table[self.ids[::-1]] = np.arange(self.columns.rows - 1, -1, -1)
        table[-1] = -1
        return table

    def rows(self, rank: Array, op: Array | int, stage: Array | int, microbatch: Array) -> Array:
        """The row of each of these keys on its rank."""
        return self.table[self._ids(rank, np.asarray(op), np.asarray(stage), microbatch)]

    def _ids(self, rank: Array, op: Array, stage: Array, microbatch: Array) -> Array:
        holding = self.holding(rank, stage)
        known = (holding >= 0) & (microbatch >= -1) & (microbatch < self.numbers)
        found = (holding * len(OPS) + op) * (self.numbers + 1) + microbatch + 1
        return np.where(known, found, len(self._holdings) * len(OPS) * (self.numbers + 1))

    # Compute is on one rank only: there a stage and a microbatch are enough.

    @cached_property
    def forward(self) -> Array:
        """Row of F by stage * pieces + microbatch."""
        return self._of_all(IS_FORWARD)

    @cached_property
    def backward(self) -> Array:
        """Row of B or BW by stage * pieces + microbatch."""
        return self._of_all(IS_BACKWARD)

    @cached_property
    def weight(self) -> Array:
        """Row of W or BW by stage * pieces + microbatch."""
        return self._of_all(IS_WEIGHT)

    def cell(self, rows: Array) -> Array:
        """stage * pieces + microbatch of these rows."""
        return self.columns.stage[rows] * self.pieces + self.columns.microbatch[rows]

    def sound(self, ops: Array) -> Array:
        """Rows of these ops (see `among`) with a stage and a microbatch that there are."""
        rows = self.columns.rows_of(ops)
        _, stage, mb = self.columns.keys(rows)
        return rows[(stage >= 0) & (stage < self.stages) & (mb >= 0) & (mb < self.pieces)]

    def channel(self, rows: Array) -> Array:
        """Communicator of rows that send or receive, as a number: (whether forward, source, target)."""
        columns = self.columns
        op, rank, peer = columns.op[rows], columns.rank[rows], columns.peer[rows]
        to_here = IS_RECEIVE[op]
        source, target = np.where(to_here, peer, rank), np.where(to_here, rank, peer)
        return (_FORWARD[op] * columns.ranks + source) * columns.ranks + target

    @cached_property
    def transfers(self) -> tuple[Array, Array]:
        """Rows of sends and of receives, by channel and then in the order of streams: the k-th meets the k-th."""
        found = []
        for kind in (IS_SEND, IS_RECEIVE):
            rows = self.columns.rows_of(kind)
            found.append(rows[np.argsort(self.channel(rows), kind="stable")])
        return found[0], found[1]

    @cached_property
    def channels(self) -> tuple[Array, Array]:
        """Communicators of `transfers`."""
        sends, receives = self.transfers
        return self.channel(sends), self.channel(receives)

    def _of_all(self, ops: Array) -> Array:
        rows = self.sound(ops)
        found = np.full(self.stages * self.pieces, -1)
        found[self.cell(rows)[::-1]] = rows[::-1]
        return found
