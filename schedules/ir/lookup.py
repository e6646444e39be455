"""Finds instructions in a program: rows of its columns by rank, op, stage and microbatch."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from pentad.schedules.ir.columns import OPS, Array, Columns, op_mask
from pentad.schedules.ir.instruction import COMPUTE, RECEIVES, REDUCTIONS, SENDS, Op

IS_COMPUTE = op_mask(COMPUTE)
IS_FORWARD = op_mask({Op.F})
IS_BACKWARD = op_mask({Op.B, Op.BW})
IS_WEIGHT = op_mask({Op.W, Op.BW})
IS_REDUCTION = op_mask(REDUCTIONS)
IS_SEND, IS_RECEIVE = op_mask(SENDS), op_mask(RECEIVES)
_IS_FORWARD_TRANSFER = op_mask({Op.SEND_F, Op.RECV_F})
_IS_NUMBERED = IS_REDUCTION | op_mask({Op.ALL_GATHER, Op.FREE})  # ops whose `microbatch` counts something else


class Lookup:
    """Row numbers of instructions: -1 where there is none, and the first one where a rank has a key twice.

    Every pair of a rank and a stage that it holds is a *holding*, and so is (rank, -1) for ops without a stage. Rows of
    stages that the rank does not hold, or with a microbatch out of range, are not found.
    """

    def __init__(
        self, columns: Columns, placement: tuple[tuple[int, ...], ...], stages: int, total_slices: int
    ) -> None:
        self.columns, self.stages, self.total_slices = columns, stages, total_slices
        # Gathers are numbered by occurrence, so a valid number is below the number of rows.
        numbered = columns.microbatch[columns.rows_of(_IS_NUMBERED)]
        self.numbers = max(total_slices, int(numbered[numbered < columns.rows].max(initial=-1)) + 1)
        holdings = [rank * (stages + 1) + stage + 1 for rank, own in enumerate(placement) for stage in (-1, *own)]
        self._holdings = np.unique(np.array(holdings))

    @property
    def holdings(self) -> int:
        """The number of holdings."""
        return len(self._holdings)

    def holding(self, rank: Array, stage: Array) -> Array:
        """Index of the holding of each (rank, stage); -1 where the rank does not hold the stage."""
        code = rank * (self.stages + 1) + stage + 1
        index = np.searchsorted(self._holdings, code)
        index[index == len(self._holdings)] = 0
        known = (self._holdings[index] == code) & (stage >= -1) & (stage < self.stages)
        return np.where(known, index, -1)

    @cached_property
    def ids(self) -> Array:
        """The key of each row within its rank as one number; the largest id is for rows that cannot be found."""
        columns = self.columns
        return self._ids(columns.rank, columns.op, columns.stage, columns.microbatch)

    @cached_property
    def wait_targets(self) -> Array:
        """The row of the instruction that each wait waits for."""
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

    @cached_property
    def last_compute(self) -> Array:
        """The row of the last compute instruction of each rank; -1, or a row of an earlier rank, where it has none."""
        rows = self.columns.rows_of(IS_COMPUTE)
        return np.append(rows, -1)[np.searchsorted(rows, self.columns.rank_offsets[1:]) - 1]

    def rows(self, rank: Array, op: Array | int, stage: Array | int, microbatch: Array) -> Array:
        """The row of each key on its rank."""
        return self.table[self._ids(rank, np.asarray(op), np.asarray(stage), microbatch)]

    def _ids(self, rank: Array, op: Array, stage: Array, microbatch: Array) -> Array:
        holding = self.holding(rank, stage)
        known = (holding >= 0) & (microbatch >= -1) & (microbatch < self.numbers)
        ids = (holding * len(OPS) + op) * (self.numbers + 1) + microbatch + 1
        return np.where(known, ids, len(self._holdings) * len(OPS) * (self.numbers + 1))

    # A microbatch's compute on a stage runs on one rank only, so (stage, microbatch), a *cell*, is enough to find it.

    def cell(self, rows: Array) -> Array:
        """stage * total_slices + microbatch of these rows."""
        return self.columns.stage[rows] * self.total_slices + self.columns.microbatch[rows]

    @cached_property
    def forward(self) -> Array:
        """Row of F by cell."""
        return self._by_cell(IS_FORWARD)

    @cached_property
    def backward(self) -> Array:
        """Row of B or BW by cell."""
        return self._by_cell(IS_BACKWARD)

    @cached_property
    def weight(self) -> Array:
        """Row of W or BW by cell."""
        return self._by_cell(IS_WEIGHT)

    @cached_property
    def activation_reader(self) -> Array:
        """Row of the last reader of what a stage receives, by cell: B or BW, or F if that is all."""
        return np.where(self.backward < 0, self.forward, self.backward)

    def _by_cell(self, mask: Array) -> Array:
        rows = self.valid_rows(mask)
        found = np.full(self.stages * self.total_slices, -1)
        found[self.cell(rows)[::-1]] = rows[::-1]
        return found

    def valid_rows(self, mask: Array) -> Array:
        """Rows of some ops (see `op_mask`) whose stage and microbatch are in range."""
        rows = self.columns.rows_of(mask)
        _, stage, mb = self.columns.keys(rows)
        return rows[(stage >= 0) & (stage < self.stages) & (mb >= 0) & (mb < self.total_slices)]

    def channel(self, rows: Array) -> Array:
        """Number of the communicator that each send or receive uses: one per (direction, source rank, target rank)."""
        columns = self.columns
        op, rank, peer = columns.op[rows], columns.rank[rows], columns.peer[rows]
        receives = IS_RECEIVE[op]
        source, target = np.where(receives, peer, rank), np.where(receives, rank, peer)
        return (_IS_FORWARD_TRANSFER[op] * columns.ranks + source) * columns.ranks + target

    @cached_property
    def transfers(self) -> tuple[Array, Array]:
        """Rows of sends and of receives, by channel, then in stream order: the k-th send meets the k-th receive."""

        def ordered(mask: Array) -> Array:
            rows = self.columns.rows_of(mask)
            return rows[np.argsort(self.channel(rows), kind="stable")]

        return ordered(IS_SEND), ordered(IS_RECEIVE)

    @cached_property
    def channels(self) -> tuple[Array, Array]:
        """Channels of `transfers`."""
        sends, receives = self.transfers
        return self.channel(sends), self.channel(receives)
