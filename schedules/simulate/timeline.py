"""When every instruction ran: the same table for simulated and measured steps."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
import pyarrow as pa

from pentad.schedules.ir.arrow_file import file_bytes, read_table, require_no_nulls, require_range, rows_of, table_of
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.ir.instruction import Op
from pentad.schedules.ir.plain_files import plain_file

LONGEST_SECONDS = 1e10  # on a timeline's clock: more than 300 years
COMPUTE = frozenset({"F", "B", "W", "BW", "RECOMPUTE"})
_Key = TypeVar("_Key", bound=Hashable)
_Item = TypeVar("_Item")


class Span(NamedTuple):
    """One instruction's time on one rank; an overlapped pair has two spans.

    `start` and `end` are seconds on the timeline's clock. `rank` is a pipeline rank (simulated) or a rank of the run
    (measured). `peer` is the other end of a transfer, else -1.
    """

    step: int
    rank: int
    lane: str
    name: str
    op: str
    stage: int
    microbatch: int
    peer: int
    start: float
    end: float


_TYPES = [pa.int64(), pa.int32(), *[pa.string()] * 3, *[pa.int32()] * 3, *[pa.float64()] * 2]
SCHEMA = pa.schema(list(zip(Span._fields, _TYPES, strict=True)))


@dataclass(frozen=True)
class Bubble:
    """Idle share of the ranks' time, 0 to 1, by two definitions that must never be mixed.

    `longest` relates to the time of the rank that takes longest from its own first start to its own last end, as the
    zero-bubble papers do: right where no barrier precedes the optimizer step. `makespan` relates to the time from the
    first start to the last end over all ranks: what a step with a barrier takes.
    """

    longest: float
    makespan: float


@dataclass(frozen=True)
class Timeline:
    """Spans of one or more steps. `source` is 'simulated' or 'measured'."""

    source: str
    spans: tuple[Span, ...]

    def of_step(self, step: int) -> Timeline:
        return Timeline(self.source, tuple(span for span in self.spans if span.step == step))

    @property
    def steps(self) -> tuple[int, ...]:
        return tuple(sorted({span.step for span in self.spans}))

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted({span.rank for span in self.spans}))

    @cached_property
    def compute(self) -> tuple[Span, ...]:
        return tuple(span for span in self.spans if span.op in COMPUTE)

    @property
    def makespan(self) -> float:
        """Seconds from the first compute start to the last compute end over all ranks."""
        return max(s.end for s in self.compute) - min(s.start for s in self.compute)

    @property
    def longest(self) -> float:
        """Seconds from a rank's first compute start to its last compute end, for the rank where they are most."""
        return max(end - start for start, end, _ in self.busy_by_rank.values())

    @cached_property
    def busy_by_rank(self) -> dict[int, tuple[float, float, float]]:
        """Rank -> (first compute start, last compute end, seconds of compute)."""
        found: dict[int, tuple[float, float, float]] = {}
        for s in sorted(self.compute, key=lambda span: span.start):
            start, end, busy = found.get(s.rank, (s.start, s.start, 0.0))
            added = max(0.0, s.end - max(s.start, end))  # time that both halves of a pair cover counts once
            found[s.rank] = (start, max(end, s.end), busy + added)
        return found

    def bubble(self) -> Bubble:
        """1 - mean busy time / longest, and 1 - mean busy time / makespan."""
        busy = [value for _, _, value in self.busy_by_rank.values()]
        mean = sum(busy) / len(busy)
        return Bubble(1 - mean / self.longest, 1 - mean / self.makespan)

    def to_arrow(self) -> pa.Table:
        return table_of(self.spans, SCHEMA).replace_schema_metadata({"source": self.source, "version": "1"})

    @staticmethod
    def from_arrow(table: pa.Table) -> Timeline:
        """Raises PentadError if the table is not a timeline."""
        if not table.schema.equals(SCHEMA):
            text = f"the Arrow table is not a timeline: its columns are {table.schema.names}"
            raise PentadError(f"{text}: expected {SCHEMA.names}, of type {', '.join(map(str, _TYPES))}")
        _check_values(table)
        source = (table.schema.metadata or {}).get(b"source", b"measured").decode(errors="replace")
        return Timeline(source, tuple(map(Span._make, rows_of(table))))

    def to_bytes(self) -> bytes:
        """The content of an Arrow file."""
        return file_bytes(self.to_arrow())

    def save(self, path: Path) -> None:
        path.write_bytes(self.to_bytes())

    @staticmethod
    def load(path: Path) -> Timeline:
        """Raises PentadError if `save` did not write the file."""
        plain_file(path)
        try:
            return Timeline.from_arrow(read_table(path.read_bytes()))
        except (OSError, PentadError) as error:
            raise PentadError(f"{path} is not a readable timeline: {error}") from None


def _check_values(table: pa.Table) -> None:
    """Raises PentadError for a value that no span has."""
    require_no_nulls(table)
    for name, low in {"step": 0, "rank": 0, "stage": -1, "microbatch": -1, "peer": -1}.items():
        require_range(table, name, low, math.inf)
    for name in ("start", "end"):
        require_range(table, name, -LONGEST_SECONDS, LONGEST_SECONDS)
    if unknown := {*table.column("op").unique().to_pylist()} - {*Op}:
        raise PentadError(f"column op of the Arrow table has {min(unknown)!r}: expected {', '.join(Op)}")
    starts, ends = (table.column(name).to_numpy() for name in ("start", "end"))
    if len(backwards := np.flatnonzero(ends < starts)):
        row = backwards[0]
        raise PentadError(f"row {row} of the Arrow table ends at {ends[row]}: expected at least {starts[row]}")


def grouped(items: Iterable[_Item], key: Callable[[_Item], _Key]) -> dict[_Key, list[_Item]]:
    """The items of each key, in their order."""
    found = defaultdict[_Key, list[_Item]](list)
    for item in items:
        found[key(item)].append(item)
    return dict(found)


def attributed_seconds(spans: Sequence[Span]) -> Iterator[tuple[Span, float]]:
    """Every span with its seconds. The halves of an overlapped pair share the pair's time: 1 part for F or B, 2 for
    BW."""
    last: dict[int, Span] = {}
    other_half: dict[Span, Span] = {}
    for span in sorted((span for span in spans if span.op in COMPUTE), key=lambda span: span.start):
        before = last.get(span.rank)
        if before is not None and span.start < before.end:
            other_half |= {before: span, span: before}
        last[span.rank] = span
    for span in spans:
        other = other_half.get(span, span)
        together = max(span.end, other.end) - min(span.start, other.start)
        yield span, together * (1.0 if other is span else len(span.op) / len(span.op + other.op))
