"""Streams as columns: a row an instruction, rank after rank, so that passes and proofs are array operations."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, pairwise
from typing import Any

import numpy as np

from pentad.schedules.ir.errors import PentadError
from pentad.schedules.ir.instruction import Instruction, Key, Op, Overlap, Unit

Array = np.ndarray[Any, np.dtype[Any]]
Stream = tuple[Unit, ...]
OPS = tuple(Op)
CODE = {op: code for code, op in enumerate(OPS)}


def among(ops: Iterable[Op]) -> Array:
    """A table by op code: whether it is one of `ops`."""
    expected = frozenset(ops)
    return np.array([op in expected for op in OPS])


@dataclass(frozen=True, eq=False)
class Columns:
    """Rows of rank r are first[r] to first[r + 1]; the waits of row i are wait_first[i] to wait_first[i + 1].

    `op` and `wait_op` are positions in `OPS`, `group` one in `groups`, which are sorted; `second` marks the second half
    of an overlapped pair. Whatever a tuple of instructions can say, of a right program or not, its columns say too.
    """

    first: Array
    op: Array
    stage: Array
    microbatch: Array
    peer: Array
    group: Array
    slot: Array
    second: Array
    wait_first: Array
    wait_op: Array
    wait_stage: Array
    wait_microbatch: Array
    groups: tuple[str, ...]

    @property
    def of_row(self) -> tuple[Array, ...]:
        return self.op, self.stage, self.microbatch, self.peer, self.group, self.slot, self.second

    @property
    def of_wait(self) -> tuple[Array, Array, Array]:
        return self.wait_op, self.wait_stage, self.wait_microbatch

    @property
    def rows(self) -> int:
        return len(self.op)

    @property
    def ranks(self) -> int:
        return len(self.first) - 1

    @cached_property
    def rank(self) -> Array:
        """Rank of every row."""
        return np.repeat(np.arange(self.ranks), np.diff(self.first))

    @cached_property
    def unit(self) -> Array:
        """Number of the unit of every row; units are counted through all ranks."""
        return np.cumsum(~self.second) - 1

    @cached_property
    def unit_row(self) -> Array:
        """First row of every unit."""
        return np.flatnonzero(~self.second)

    @cached_property
    def unit_first(self) -> Array:
        """Number of the first unit of every rank, and how many units there are."""
        return np.searchsorted(self.unit_row, self.first)

    @cached_property
    def wait_row(self) -> Array:
        """Row of every wait."""
        return np.repeat(np.arange(self.rows), np.diff(self.wait_first))

    def rows_of(self, table: Array) -> Array:
        """Rows whose op a table has (see `among`)."""
        return np.flatnonzero(table.take(self.op))

    def place(self, row: int) -> tuple[int, int]:
        """Rank of a row and the position of its unit in that rank's stream."""
        rank = int(self.rank[row])
        return rank, int(self.unit[row] - self.unit_first[rank])

    def keys(self, rows: Array) -> tuple[Array, Array, Array]:
        """Op, stage and microbatch of these rows."""
        return self.op[rows], self.stage[rows], self.microbatch[rows]

    def key(self, row: int) -> Key:
        return Key(OPS[self.op[row]], int(self.stage[row]), int(self.microbatch[row]))

    def wait_key(self, wait: int) -> Key:
        return Key(OPS[self.wait_op[wait]], int(self.wait_stage[wait]), int(self.wait_microbatch[wait]))

    def waits(self, row: int) -> tuple[Key, ...]:
        return tuple(map(self.wait_key, range(self.wait_first[row], self.wait_first[row + 1])))

    def decode(self, rank: int) -> Stream:
        """The stream of a rank as units."""
        start, end = int(self.first[rank]), int(self.first[rank + 1])
        rows = list(self._instructions(start, end))
        pairs = np.flatnonzero(self.second[start:end]).tolist()
        if not pairs:
            return tuple(rows)
        units: list[Unit | None] = list(rows)
        for at in pairs:
            units[at - 1 : at + 1] = Overlap(rows[at - 1], rows[at]), None
        return tuple(unit for unit in units if unit is not None)

    def _instructions(self, start: int, end: int) -> Iterator[Instruction]:
        begin, stop = int(self.wait_first[start]), int(self.wait_first[end])
        op, *numbers = (column[begin:stop].tolist() for column in self.of_wait)
        keys = list(map(Key._make, zip(map(OPS.__getitem__, op), *numbers, strict=True)))
        edges = (self.wait_first[start : end + 1] - begin).tolist()
        waits = (tuple(keys[a:b]) for a, b in pairwise(edges))
        op, stage, mb, peer, group, slot = (column[start:end].tolist() for column in self.of_row[:-1])
        names = map(self.groups.__getitem__, group)
        return map(Instruction._make, zip(map(OPS.__getitem__, op), stage, mb, peer, names, slot, waits, strict=True))

    def take(self, first: Array, rows: Array) -> Columns:
        """All rows in this order; `first` tells the rank of each."""
        counts = np.diff(self.wait_first)[rows]
        ends = np.concatenate(([0], np.cumsum(counts)))
        at = np.arange(ends[-1]) + np.repeat(self.wait_first[rows] - ends[:-1], counts)
        of_wait = [column[at] for column in self.of_wait]
        return columns(first, [column[rows] for column in self.of_row], ends, of_wait, self.groups)

    def bare(self, first: Array, rows: Array) -> Columns:
        """Some rows in this order, as `take` does, with nothing but the op, stage and microbatch of each."""
        return replace(plain(first, *self.keys(rows)), second=self.second[rows])

    def waiting(self, rows: Array, op: Array, stage: Array, microbatch: Array) -> Columns:
        """The same, where these rows also wait for these keys, behind the waits that they have."""
        row = np.concatenate((self.wait_row, rows))
        order = np.argsort(row, kind="stable")
        ends = np.concatenate(([0], np.bincount(row, minlength=self.rows).cumsum()))
        parts = zip(self.of_wait, (op, stage, microbatch), strict=True)
        of_wait = [np.concatenate((mine, more.astype(mine.dtype)))[order] for mine, more in parts]
        return columns(self.first, self.of_row, ends, of_wait, self.groups)

    def __add__(self, other: Columns) -> Columns:
        """The rows of two, those of `other` behind, as if all were of one rank."""
        groups = tuple(sorted({*self.groups, *other.groups}))
        recoded = (one._grouped(groups).of_row for one in (self, other))
        of_row = list(map(np.concatenate, zip(*recoded, strict=True)))
        of_wait = list(map(np.concatenate, zip(self.of_wait, other.of_wait, strict=True)))
        ends = np.concatenate((self.wait_first, self.wait_first[-1] + other.wait_first[1:]))
        return columns(np.array([0, len(of_row[0])]), of_row, ends, of_wait, groups)

    def _grouped(self, groups: tuple[str, ...]) -> Columns:
        """The same, where these are the groups: its own and others."""
        if groups == self.groups:
            return self
        codes = np.array([groups.index(name) for name in self.groups], np.int32)
        return replace(self, group=codes[self.group], groups=groups)

    def arrays(self) -> list[Array]:
        """The columns in a form that is the same on every machine."""
        numbers = [column.astype("<i4") for column in self.of_row + self.of_wait]
        return [self.first.astype("<i8"), self.wait_first.astype("<i8"), *numbers]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Columns):
            return NotImplemented
        return self.groups == other.groups and all(map(np.array_equal, self.arrays(), other.arrays()))


def columns(
    first: Array, of_row: Sequence[Array], wait_first: Array, of_wait: Sequence[Array], groups: tuple[str, ...]
) -> Columns:
    op, stage, microbatch, peer, group, slot, second = of_row
    wait_op, wait_stage, wait_microbatch = of_wait
    parts = wait_op, wait_stage, wait_microbatch
    return Columns(first, op, stage, microbatch, peer, group, slot, second, wait_first, *parts, groups)


def plain(first: Array, op: Array, stage: Array, microbatch: Array) -> Columns:
    """Instructions with nothing but an op, a stage and a microbatch each, none of a pair."""
    none, empty = np.full(len(op), -1, np.int32), np.zeros(0, np.int32)
    of_row = (op, stage, microbatch, none, none + 1, none, np.zeros(len(op), bool))
    return columns(first, of_row, np.zeros(len(op) + 1, int), (op[:0], empty, empty), ("",) if len(op) else ())


def pack(streams: Sequence[Stream]) -> Columns:
    """Raises PentadError for a number that no instruction can have."""
    rows: list[Instruction] = []
    second: list[int] = []
    first = [0]
    for stream in streams:
        if set(map(len, stream)) <= {len(Instruction._fields)}:
            rows += stream  # type: ignore[arg-type]  # no pairs
        else:
            for unit in stream:
                rows += unit.parts
                second += [len(rows) - 1] if len(unit.parts) == 2 else []
        first.append(len(rows))
    return from_rows(first, rows, second)


def from_rows(first: Sequence[int], rows: Sequence[Instruction], second: Sequence[int]) -> Columns:
    """`second` are the rows that are the second half of a pair."""
    op, stage, mb, peer, group, slot, waits = _transposed(rows, len(Instruction._fields))
    wait_op, wait_stage, wait_mb = _transposed(list(chain.from_iterable(waits)), len(Key._fields))
    groups = sorted(set(group))
    codes = [groups.index(name) for name in group] if len(groups) > 1 else [0] * len(rows)
    halves = np.zeros(len(rows), bool)
    halves[np.asarray(second, int)] = True
    numbers = [*map(_numbers, (stage, mb, peer)), np.array(codes, np.int32), _numbers(slot)]
    ends = np.concatenate(([0], np.cumsum(np.fromiter(map(len, waits), int, len(rows)))))
    of_wait = _codes(wait_op), _numbers(wait_stage), _numbers(wait_mb)
    return columns(np.array(first), [_codes(op), *numbers, halves], ends, of_wait, tuple(groups))


def _transposed(rows: Sequence[tuple[Any, ...]], width: int) -> list[list[Any]]:
    """`zip(*rows)` in blocks that stay in the processor's cache."""
    found: list[list[Any]] = [[] for _ in range(width)]
    for start in range(0, len(rows), 512):
        for column, part in zip(found, zip(*rows[start : start + 512], strict=True), strict=True):
            column += part
    return found


def _codes(ops: Iterable[Op]) -> Array:
    return np.array(list(map(CODE.__getitem__, ops)), np.int8)


def _numbers(values: Sequence[int]) -> Array:
    try:
        return np.array(values, np.int32)
    except OverflowError:
        wrong = max(values, key=abs)
        raise PentadError(f"an instruction has the number {wrong}, but at most {2**31 - 1} can be told") from None
