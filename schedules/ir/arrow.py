"""Instruction columns as an Arrow table that anyone can read: ops, lanes, groups and waits by name."""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import numpy as np
import pyarrow as pa

from pentad.schedules.ir.arrow_arrays import filled_array
from pentad.schedules.ir.columns import OPS, Columns, from_rows
from pentad.schedules.ir.instruction import Instruction, Key, Op, parse_key

VERSION = "1"
SCHEMA = pa.schema(
    [
        ("rank", pa.int32()),
        ("index", pa.int32()),  # position in the stream; the two halves of an overlapped pair share it
        ("op", pa.string()),
        ("stage", pa.int32()),
        ("microbatch", pa.int32()),
        ("lane", pa.string()),
        ("peer", pa.int32()),
        ("group", pa.string()),
        ("slot", pa.int32()),
        ("waits", pa.list_(pa.string())),
    ]
)


def to_table(columns: Columns) -> pa.Table:
    @cache
    def lane(op: int, peer: int) -> str:
        return Instruction(OPS[op], peer=peer).lane

    ops, peers = columns.op.tolist(), columns.peer.tolist()
    keys = zip(*(column.tolist() for column in columns.wait_columns), strict=True)
    waits = filled_array((Key(OPS[op], stage, mb) for op, stage, mb in keys), pa.string())
    arrays = [
        columns.rank,
        columns.action - columns.action_offsets[columns.rank] if columns.rows else columns.rank,
        [OPS[op].value for op in ops],
        columns.stage,
        columns.microbatch,
        [lane(op, peer) for op, peer in zip(ops, peers, strict=True)],
        columns.peer,
        [columns.groups[code] for code in columns.group.tolist()],
        columns.slot,
    ]
    filled = [filled_array(values, field.type) for values, field in zip(arrays, SCHEMA, strict=False)]
    lists = pa.ListArray.from_arrays(filled_array(columns.wait_offsets, pa.int32()), waits)
    return pa.table([*filled, lists], schema=SCHEMA)


def from_table(table: pa.Table, ranks: int) -> Columns:
    """The streams of `ranks` ranks. A table that `to_table` did not make gives other columns, or raises anything."""
    key = cache(parse_key)
    names = ("rank", "index", "op", "stage", "microbatch", "peer", "group", "slot", "waits")
    rank, index, op, *numbers, waits = (table.column(name).to_pylist() for name in names)
    fields = zip(map(Op, op), *numbers, (tuple(map(key, texts)) for texts in waits), strict=True)
    positions = list(zip(rank, index, strict=True))
    seconds = [at for at in range(1, len(positions)) if positions[at] == positions[at - 1]]
    if any(after - before == 1 for before, after in pairwise(seconds)):
        raise ValueError("three instructions share a position")
    rank_offsets = np.searchsorted(np.array(rank, int), np.arange(ranks + 1))
    return from_rows(rank_offsets.tolist(), list(map(Instruction._make, fields)), seconds)
