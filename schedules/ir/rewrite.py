"""Inserts instructions into streams: the one way in which passes add to a program."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from pentad.schedules.ir.columns import CODE, Array, Columns, pack
from pentad.schedules.ir.instruction import Instruction, Key
from pentad.schedules.ir.program import Program

Addition = tuple[int, int, Instruction]  # rank, the position in its stream to insert before, the instruction


def insert(
    program: Program, additions: Sequence[Addition], waits: Mapping[tuple[int, Key], Iterable[Key]] | None = None
) -> Program:
    """A program with more instructions, and with more waits of existing instructions, named by (rank, key).

    Positions count the units of the original streams; the length of a stream is its end. Additions at one position
    keep their order. Raises KeyError for a wait of an instruction that does not exist.
    """
    columns = _with_more_waits(program, waits or {})
    if not additions:
        return program.with_columns(columns)
    ranks = np.array([rank for rank, _, _ in additions], int)
    units = columns.unit_offsets[ranks] + np.array([position for _, position, _ in additions], int)
    added = pack([tuple(instruction for _, _, instruction in additions)])
    return program.with_columns(insert_rows(columns, added, ranks, columns.row_before(units)))


def insert_rows(columns: Columns, added: Columns, ranks: Array, before: Array) -> Columns:
    """`columns` with added row k on `ranks[k]`, before the original row `before[k]`; added rows that go to the same
    place keep their order."""
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


def _with_more_waits(program: Program, waits: Mapping[tuple[int, Key], Iterable[Key]]) -> Columns:
    pairs = [(rank, key, more) for (rank, key), keys in waits.items() for more in keys]
    if not pairs:
        return program.columns
    ranks, keys, more = zip(*pairs, strict=True)
    rows = program.lookup.rows(np.array(ranks), *_arrays(keys))
    if (rows < 0).any():
        missing = int(np.argmin(rows))
        raise KeyError(f"rank {ranks[missing]} has no {keys[missing]}")
    return program.columns.with_waits(rows, *_arrays(more))


def _arrays(keys: Sequence[Key]) -> tuple[Array, Array, Array]:
    op, stage, microbatch = zip(*keys, strict=True)
    return np.array([CODE[each] for each in op]), np.array(stage), np.array(microbatch)
