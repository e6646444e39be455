"""Puts instructions into streams: the one way in which passes add to a program."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from pentad.schedules.ir.columns import CODE, Array, Columns, pack
from pentad.schedules.ir.instruction import Instruction, Key
from pentad.schedules.ir.program import Program

Addition = tuple[int, int, Instruction]  # rank, position in its stream before which it comes, and what comes


def insert(
    program: Program, additions: Sequence[Addition], waits: Mapping[tuple[int, Key], Iterable[Key]] | None = None
) -> Program:
    """A program with more instructions, and with more waits of those at (rank, key) that it has already.

    Positions are those of units in the streams as they were, the length of a stream for its end; what is added at one
    position stays in the order in which it is given. Raises KeyError for a wait of an instruction that is not there.
    """
    columns = _waiting(program, waits or {})
    if not additions:
        return program.with_columns(columns)
    ranks = np.array([rank for rank, _, _ in additions], int)
    units = columns.unit_first[ranks] + np.array([at for _, at, _ in additions], int)
    places = np.append(columns.unit_row, columns.rows)[units]
    added = pack([tuple(part for _, _, part in additions)])
    return program.with_columns(woven(columns, added, ranks, places))


def woven(columns: Columns, added: Columns, ranks: Array, places: Array) -> Columns:
    """The k-th of the added rows stands on `ranks[k]` before what was row `places[k]`, behind others of that place that
    come before it."""
    joined = columns + added
    order = np.argsort(places + ranks, kind="stable")  # the end of a rank's rows is where those of the next start
    at = np.zeros(joined.rows, bool)
    at[places[order] + np.arange(added.rows)] = True
    rows = np.empty(joined.rows, int)
    rows[at] = columns.rows + order
    rows[~at] = np.arange(columns.rows)
    grown = np.concatenate(([0], np.cumsum(np.bincount(ranks, minlength=columns.ranks))))
    return joined.take(columns.first + grown, rows)


def _waiting(program: Program, waits: Mapping[tuple[int, Key], Iterable[Key]]) -> Columns:
    pairs = [(rank, key, more) for (rank, key), keys in waits.items() for more in keys]
    if not pairs:
        return program.columns
    ranks, keys, more = zip(*pairs, strict=True)
    rows = program.lookup.rows(np.array(ranks), *map(np.array, _columns(keys)))
    if (rows < 0).any():
        at = int(np.argmin(rows))
        raise KeyError(f"rank {ranks[at]} has no {keys[at]}")
    return program.columns.waiting(rows, *map(np.array, _columns(more)))


def _columns(keys: Sequence[Key]) -> tuple[list[int], list[int], list[int]]:
    return [CODE[key.op] for key in keys], [key.stage for key in keys], [key.microbatch for key in keys]
