"""When every instruction ran, simulated or measured: one table, the same columns for both."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa

from pentad.schedules.ir.errors import PentadError

COMPUTE = frozenset({"F", "B", "W", "BW", "RECOMPUTE"})
SCHEMA = pa.schema(
    [
        ("step", pa.int64()),
        ("rank", pa.int32()),
        ("lane", pa.string()),
        ("name", pa.string()),
        ("op", pa.string()),
        ("stage", pa.int32()),
        ("microbatch", pa.int32()),
        ("peer", pa.int32()),
        ("start", pa.float64()),
        ("end", pa.float64()),
    ]
)


class Span(NamedTuple):
    """One instruction's time on one rank.

    `start` and `end` are seconds on the clock of the timeline; `rank` is the rank of the timeline's program (simulated)
    or of the run (measured); `peer` is the rank at the other end of a transfer, else -1. The two halves of an
    overlapped pair are two spans.
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


@dataclass(frozen=True)
class Bubble:
    """Idle share of the ranks' time, 0 to 1, by the two measures of the field; never mix them.

    `longest`: against the busiest rank's own first start to last end (zero-bubble papers, no barrier before the step);
    `makespan`: against global start to global end (what a step with a barrier pays).
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

    @property
    def compute(self) -> tuple[Span, ...]:
        return tuple(span for span in self.spans if span.op in COMPUTE)

    @property
    def makespan(self) -> float:
        """Seconds from the first compute start to the last compute end over all ranks."""
        return max(s.end for s in self.compute) - min(s.start for s in self.compute)

    @property
    def longest(self) -> float:
        """Seconds from first compute start to last compute end of the rank where that is longest."""
        return max(end - start for start, end, _ in self.by_rank().values())

    def by_rank(self) -> dict[int, tuple[float, float, float]]:
        """First compute start, last compute end and busy compute seconds of each rank."""
        found: dict[int, tuple[float, float, float]] = {}
        for s in sorted(self.compute, key=lambda span: span.start):
            start, end, busy = found.get(s.rank, (s.start, s.start, 0.0))
            alone = max(0.0, s.end - max(s.start, end))  # overlapped halves count once
            found[s.rank] = (start, max(end, s.end), busy + alone)
        return found

    def bubble(self) -> Bubble:
        """1 - mean busy time / longest, and 1 - mean busy time / makespan."""
        busy = [value for _, _, value in self.by_rank().values()]
        mean = sum(busy) / len(busy)
        return Bubble(1 - mean / self.longest, 1 - mean / self.makespan)

    def to_arrow(self) -> pa.Table:
        columns = zip(*self.spans, strict=True) if self.spans else ([] for _ in SCHEMA)
        table = pa.table([pa.array(c, f.type) for c, f in zip(columns, SCHEMA, strict=True)], schema=SCHEMA)
        return table.replace_schema_metadata({"source": self.source, "version": "1"})

    @staticmethod
    def from_arrow(table: pa.Table) -> Timeline:
        """Raises PentadError when the table is not a timeline."""
        if table.schema.names != SCHEMA.names:
            raise PentadError(
                f"the Arrow table is not a timeline: columns {table.schema.names}: expected {SCHEMA.names}"
            )
        source = (table.schema.metadata or {}).get(b"source", b"measured").decode()
        rows: Iterable[tuple] = zip(*(table.column(name).to_pylist() for name in SCHEMA.names), strict=True)
        return Timeline(source, tuple(Span(*row) for row in rows))

    def save(self, path: Path) -> None:
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, self.to_arrow().schema) as writer:
            writer.write_table(self.to_arrow())

    @staticmethod
    def load(path: Path) -> Timeline:
        """Raises PentadError when the file is not one that `save` wrote."""
        try:
            with pa.memory_map(str(path)) as source:
                return Timeline.from_arrow(pa.ipc.open_file(source).read_all())
        except (OSError, pa.ArrowException, PentadError) as error:
            raise PentadError(f"{path} is not a readable timeline: {error}") from None


def parted(spans: Sequence[Span]) -> Iterator[tuple[Span, float]]:
    """Every span with its seconds; of two that a rank computes by turns, with its part of their time: 1 of F or B, 2
    of BW."""
    last: dict[int, Span] = {}
    halves: dict[Span, Span] = {}
    for span in sorted((span for span in spans if span.op in COMPUTE), key=lambda span: span.start):
        before = last.get(span.rank)
        if before is not None and span.start < before.end:
            halves |= {before: span, span: before}
        last[span.rank] = span
    for span in spans:
        other = halves.get(span, span)
        together = max(span.end, other.end) - min(span.start, other.start)
        yield span, together * (1.0 if other is span else len(span.op) / len(span.op + other.op))
