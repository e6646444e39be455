"""Inserts instructions into streams, for the passes that add to a program."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pentad.schedules.ir.columns import CODE, Array, Columns, pack
from pentad.schedules.ir.instruction import Instruction, Key
from pentad.schedules.ir.program import Program

Addition = tuple[int, int, Instruction]  # rank, the position in its stream to insert before, the instruction
Wait = tuple[int, Key, Key]  # rank, an instruction of its stream, the key that it waits for


def insert(program: Program, additions: Sequence[Addition], waits: Sequence[Wait] = ()) -> Program:
    """The program with `additions` inserted, and with more waits on its own instructions.

    Positions count actions of the original streams; the length of a stream is its end. Additions at the same position
    keep their order. Raises KeyError for a wait on an instruction that does not exist.
    """
    columns = _with_waits(program, waits) if waits else program.columns
    if not additions:
        return program.with_streams(columns)
    ranks, positions, instructions = zip(*additions, strict=True)
    before = columns.row_before(columns.action_offsets[list(ranks)] + positions)
    return program.with_streams(insert_rows(columns, pack([instructions]), np.array(ranks), before))


def insert_rows(columns: Columns, added: Columns, ranks: Array, before: Array) -> Columns:
    """`columns` with added row k on rank `ranks[k]`, before the original row `before[k]`; rows added at the same place
    keep their order."""
    joined = columns + added
    # Row numbers alone cannot tell the end of a rank from the start of the next one: adding the rank does.
    order = np.argsort(before + ranks, kind="stable")
    is_added = np.zeros(joined.rows, bool)
    is_added[before[order] + np.arange(added.rows)] = True
    rows = np.empty(joined.rows, int)
    rows[is_added] = columns.rows + order
    rows[~is_added] = np.arange(columns.rows)
    shift = np.concatenate(([0], np.cumsum(np.bincount(ranks, minlength=columns.ranks))))
    return joined.take(columns.rank_offsets + shift, rows)


def _with_waits(program: Program, waits: Sequence[Wait]) -> Columns:
    ranks, keys, more = zip(*waits, strict=True)
    rows = program.lookup.rows(np.array(ranks), *_arrays(keys))
    if (rows < 0).any():
        missing = int(np.argmin(rows))
        raise KeyError(f"rank {ranks[missing]} has no {keys[missing]}")
    return program.columns.with_waits(rows, *_arrays(more))


def _arrays(keys: Sequence[Key]) -> tuple[Array, Array, Array]:
    op, stage, microbatch = zip(*keys, strict=True)
    return np.array([CODE[each] for each in op]), np.array(stage), np.array(microbatch)
