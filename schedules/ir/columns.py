"""Instruction streams as arrays, one row per instruction, so that passes and proofs are array operations."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, pairwise
from typing import Any

import numpy as np

from pentad.schedules.ir.errors import PentadError
from pentad.schedules.ir.instruction import Action, Instruction, Key, Op, Overlap

Array = np.ndarray[Any, np.dtype[Any]]
Stream = tuple[Action, ...]
OPS = tuple(Op)
CODE = {op: code for code, op in enumerate(OPS)}


def op_mask(ops: Iterable[Op]) -> Array:
    """[len(OPS)] bool, indexed by op code: whether the op is one of `ops`."""
    members = frozenset(ops)
    return np.array([op in members for op in OPS])


@dataclass(frozen=True, eq=False, repr=False)
class Columns(Sequence[Stream]):
    """The streams of all ranks as arrays; a stream is decoded into instructions on first access.

    Rows rank_offsets[r]:rank_offsets[r + 1] are the stream of rank r, and row i waits for entries
    wait_offsets[i]:wait_offsets[i + 1] of the wait columns. `op` and `wait_op` index `OPS`, `group` indexes `groups`
    (sorted), and `is_second` marks the backward of an overlapped pair. Every tuple of instructions can be expressed,
    whether it is a valid program or not.
    """

    groups: tuple[str, ...]
    rank_offsets: Array
    wait_offsets: Array
    op: Array
    stage: Array
    microbatch: Array
    peer: Array
    group: Array
    slot: Array
    is_second: Array
    wait_op: Array
    wait_stage: Array
    wait_microbatch: Array

    @property
    def row_columns(self) -> tuple[Array, ...]:
        """Columns with an entry per instruction."""
        return self.op, self.stage, self.microbatch, self.peer, self.group, self.slot, self.is_second

    @property
    def wait_columns(self) -> tuple[Array, Array, Array]:
        """Columns with an entry per wait."""
        return self.wait_op, self.wait_stage, self.wait_microbatch

    @property
    def rows(self) -> int:
        return len(self.op)

    @property
    def ranks(self) -> int:
        return len(self.rank_offsets) - 1

    @cached_property
    def rank(self) -> Array:
        """Rank of every row."""
        return np.repeat(np.arange(self.ranks), np.diff(self.rank_offsets))

    @cached_property
    def action(self) -> Array:
        """Action of every row, numbered through all ranks; the two rows of an overlapped pair are one action."""
        return np.cumsum(~self.is_second) - 1

    @cached_property
    def action_row(self) -> Array:
        """First row of every action."""
        return np.flatnonzero(~self.is_second)

    @cached_property
    def action_offsets(self) -> Array:
        """Rank r has actions action_offsets[r]:action_offsets[r + 1]."""
        return np.searchsorted(self.action_row, self.rank_offsets)

    @cached_property
    def wait_row(self) -> Array:
        """Row of every wait."""
        return np.repeat(np.arange(self.rows), np.diff(self.wait_offsets))

    def rows_of(self, mask: Array) -> Array:
        """Rows whose op is in a mask (see `op_mask`)."""
        return np.flatnonzero(mask.take(self.op))

    def position(self, row: int) -> tuple[int, int]:
        """Rank of a row, and the index of its action in that rank's stream."""
        rank = int(self.rank[row])
        return rank, int(self.action[row] - self.action_offsets[rank])

    def row_before(self, action: Array) -> Array:
        """First row of each action; for the number of actions, the number of rows."""
        return np.append(self.action_row, self.rows)[action]

    def keys(self, rows: Array) -> tuple[Array, Array, Array]:
        """Op, stage and microbatch of these rows."""
        return self.op[rows], self.stage[rows], self.microbatch[rows]

    def key(self, row: int) -> Key:
        return Key(OPS[self.op[row]], int(self.stage[row]), int(self.microbatch[row]))

    def wait_key(self, wait: int) -> Key:
        return Key(OPS[self.wait_op[wait]], int(self.wait_stage[wait]), int(self.wait_microbatch[wait]))

    def waits(self, row: int) -> tuple[Key, ...]:
        """What the instruction of a row waits for."""
        return tuple(map(self.wait_key, range(self.wait_offsets[row], self.wait_offsets[row + 1])))

    @cached_property
    def _decoded(self) -> dict[int, Stream]:
        return {}

    def __len__(self) -> int:
        return self.ranks

    def __getitem__(self, rank: int) -> Stream:  # type: ignore[override]  # no slices
        rank = range(self.ranks)[rank]
        if rank not in self._decoded:
            self._decoded[rank] = self._decode(rank)
        return self._decoded[rank]

    def _decode(self, rank: int) -> Stream:
        start, end = int(self.rank_offsets[rank]), int(self.rank_offsets[rank + 1])
        rows = list(self._instructions(start, end))
        actions: list[Action] = [*rows]
        for at in reversed(np.flatnonzero(self.is_second[start:end]).tolist()):  # backwards: earlier indices stay valid
            actions[at - 1 : at + 1] = [Overlap(rows[at - 1], rows[at])]
        return tuple(actions)

    def _instructions(self, start: int, end: int) -> Iterator[Instruction]:
        first, last = int(self.wait_offsets[start]), int(self.wait_offsets[end])
        op, *numbers = (column[first:last].tolist() for column in self.wait_columns)
        keys = list(map(Key._make, zip(map(OPS.__getitem__, op), *numbers, strict=True)))
        offsets = (self.wait_offsets[start : end + 1] - first).tolist()
        waits = (tuple(keys[a:b]) for a, b in pairwise(offsets))
        op, stage, mb, peer, group, slot = (column[start:end].tolist() for column in self.row_columns[:-1])
        names = map(self.groups.__getitem__, group)
        return map(Instruction._make, zip(map(OPS.__getitem__, op), stage, mb, peer, names, slot, waits, strict=True))

    def take(self, rank_offsets: Array, rows: Array) -> Columns:
        """These rows in this order, distributed over ranks by `rank_offsets`."""
        counts = np.diff(self.wait_offsets)[rows]
        offsets = _offsets(counts)
        at = np.arange(offsets[-1]) + np.repeat(self.wait_offsets[rows] - offsets[:-1], counts)
        waits = [column[at] for column in self.wait_columns]
        return Columns(self.groups, rank_offsets, offsets, *(column[rows] for column in self.row_columns), *waits)

    def with_waits(self, rows: Array, op: Array, stage: Array, microbatch: Array) -> Columns:
        """A copy in which rows[k] also waits for the key (op[k], stage[k], microbatch[k]), after its other waits."""
        row = np.concatenate((self.wait_row, rows))
        order = np.argsort(row, kind="stable")
        both = zip(self.wait_columns, (op, stage, microbatch), strict=True)
        waits = [np.concatenate((old, new.astype(old.dtype)))[order] for old, new in both]
        offsets = _offsets(np.bincount(row, minlength=self.rows))
        return Columns(self.groups, self.rank_offsets, offsets, *self.row_columns, *waits)

    def __add__(self, other: Columns) -> Columns:
        """The rows of both, as the stream of a single rank."""
        groups = tuple(sorted({*self.groups, *other.groups}))
        both = (one._with_groups(groups).row_columns for one in (self, other))
        rows = list(map(np.concatenate, zip(*both, strict=True)))
        waits = list(map(np.concatenate, zip(self.wait_columns, other.wait_columns, strict=True)))
        offsets = np.concatenate((self.wait_offsets, self.wait_offsets[-1] + other.wait_offsets[1:]))
        return Columns(groups, np.array([0, len(rows[0])]), offsets, *rows, *waits)

    def _with_groups(self, groups: tuple[str, ...]) -> Columns:
        """The same instructions with `group` indexing a superset of `groups`."""
        code_of = {name: code for code, name in enumerate(groups)}
        codes = np.array([code_of[name] for name in self.groups], np.int32)
        return replace(self, group=codes[self.group], groups=groups)

    def arrays(self) -> list[Array]:
        """The columns in a form that does not depend on the machine."""
        numbers = [column.astype("<i4") for column in self.row_columns + self.wait_columns]
        return [self.rank_offsets.astype("<i8"), self.wait_offsets.astype("<i8"), *numbers]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Columns):
            return isinstance(other, tuple) and tuple(self) == other
        return self.groups == other.groups and all(map(np.array_equal, self.arrays(), other.arrays()))

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return f"<Columns: {self.ranks} ranks, {self.rows} instructions>"


def _offsets(counts: Array) -> Array:
    return np.concatenate(([0], np.cumsum(counts)))


def key_columns(rank_offsets: Array, op: Array, stage: Array, microbatch: Array) -> Columns:
    """Instructions that have only an op code, a stage and a microbatch."""
    op, stage, microbatch = op.astype(np.int8), stage.astype(np.int32), microbatch.astype(np.int32)
    none, is_second = np.full(len(op), -1, np.int32), np.zeros(len(op), bool)
    rows, no_waits = (op, stage, microbatch, none, none + 1, none, is_second), (op[:0], none[:0], none[:0])
    return Columns(("",) if len(op) else (), rank_offsets, np.zeros(len(op) + 1, int), *rows, *no_waits)


def pack(streams: Sequence[Stream]) -> Columns:
    """The columns of streams. Raises PentadError for a number that does not fit into 32 bits."""
    rows: list[Instruction] = []
    seconds: list[int] = []
    rank_offsets = [0]
    for stream in streams:
        if set(map(len, stream)) <= {len(Instruction._fields)}:
            rows += stream  # type: ignore[arg-type]  # no overlapped pairs
        else:
            for action in stream:
                rows += action.parts
                seconds += [len(rows) - 1] if len(action.parts) == 2 else []
        rank_offsets.append(len(rows))
    return from_rows(rank_offsets, rows, seconds)


def from_rows(rank_offsets: Sequence[int], rows: Sequence[Instruction], seconds: Sequence[int]) -> Columns:
    """The columns of `rows`; `seconds` are the indices of those that are the second half of an overlapped pair."""
    op, stage, mb, peer, group, slot, waits = _transposed(rows, len(Instruction._fields))
    wait_op, wait_stage, wait_mb = _transposed(list(chain.from_iterable(waits)), len(Key._fields))
    groups = sorted(set(group))
    code = {name: number for number, name in enumerate(groups)}
    is_second = np.zeros(len(rows), bool)
    is_second[np.asarray(seconds, int)] = True
    numbers = stage, mb, peer, list(map(code.__getitem__, group)), slot
    row_columns = [_op_codes(op), *map(_int32, numbers), is_second]
    wait_columns = [_op_codes(wait_op), *map(_int32, (wait_stage, wait_mb))]
    offsets = _offsets(np.fromiter(map(len, waits), int, len(rows)))
    return Columns(tuple(groups), np.array(rank_offsets), offsets, *row_columns, *wait_columns)


def _transposed(rows: Sequence[tuple[Any, ...]], width: int) -> list[list[Any]]:
    """`zip(*rows)`, in blocks that stay in the CPU's cache."""
    found: list[list[Any]] = [[] for _ in range(width)]
    for start in range(0, len(rows), 512):
        for column, part in zip(found, zip(*rows[start : start + 512], strict=True), strict=True):
            column += part
    return found


def _op_codes(ops: Iterable[Op]) -> Array:
    return np.array(list(map(CODE.__getitem__, ops)), np.int8)


def _int32(values: Sequence[int]) -> Array:
    try:
        return np.array(values, np.int32)
    except OverflowError:
        largest = max(values, key=abs)
        raise PentadError(f"an instruction holds the number {largest}: expected at most {2**31 - 1}") from None
