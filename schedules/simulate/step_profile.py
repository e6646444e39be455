"""What torch's profiler saw on a rank during a step: host operators, GPU kernels, and the instruction of each."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import pyarrow as pa

from pentad.schedules.ir.arrow_arrays import filled_array
from pentad.schedules.ir.arrow_file import read_table, require_no_nulls, require_range, rows_of
from pentad.schedules.ir.errors import PentadError

INSTRUCTION, OPERATOR, KERNEL, ASYNC = "instruction", "operator", "kernel", "async"
KINDS = (INSTRUCTION, KERNEL, OPERATOR, ASYNC)
LONGEST_NANOSECONDS = 2.0**62


class ProfileEvent(NamedTuple):
    """Something that ran from `start` for some `nanoseconds`, on the rank's monotonic clock: an instruction as the host
    issued it, an operator (or a call of the CUDA runtime) on a host thread, what such a thread began and did not wait
    for (async), or a kernel or copy on a GPU stream.
    `track` is the number of the thread or stream; `instruction` and `op` are those that it belongs to ('1F4' and 'F',
    '1F4+2BW0' and 'F+BW'), '' outside of all."""

    kind: str
    name: str
    instruction: str
    op: str
    track: int
    start: int
    nanoseconds: int

    @property
    def end(self) -> int:
        return self.start + self.nanoseconds


class RankProfile(NamedTuple):
    """A rank's profile of a step: the events in `data` (see `unpack`), without the `left_out` shortest ones. Where
    something went wrong, `problem` says what."""

    data: bytes = b""
    left_out: int = 0
    problem: str = ""


_TEXTS, _NUMBERS = ProfileEvent._fields[:4], ProfileEvent._fields[4:]
_TEXT = pa.dictionary(pa.int32(), pa.string())
SCHEMA = pa.schema([*((name, _TEXT) for name in _TEXTS), *((name, pa.int64()) for name in _NUMBERS)])


def pack(events: Sequence[ProfileEvent]) -> bytes:
    """A compressed Arrow file."""
    columns = list(zip(*events, strict=True)) if events else [()] * len(SCHEMA)
    texts = [_dictionary(column) for column in columns[: len(_TEXTS)]]
    numbers = [filled_array(column, pa.int64()) for column in columns[len(_TEXTS) :]]
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, SCHEMA, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
        writer.write_table(pa.table([*texts, *numbers], schema=SCHEMA))
    return sink.getvalue().to_pybytes()


def _dictionary(texts: Iterable[str]) -> pa.Array:
    numbers = dict[str, int]()
    indices = [numbers.setdefault(text, len(numbers)) for text in texts]
    return pa.DictionaryArray.from_arrays(filled_array(indices, pa.int32()), filled_array(numbers, pa.string()))


def unpack(data: bytes) -> tuple[ProfileEvent, ...]:
    """Raises PentadError if `pack` did not write the bytes."""
    table = read_table(data)
    if not table.schema.equals(SCHEMA):
        raise PentadError(
            f"the Arrow table is no profile: its columns are {table.schema.names}: expected {SCHEMA.names}"
        )
    require_no_nulls(table)
    require_range(table, "start", -LONGEST_NANOSECONDS, LONGEST_NANOSECONDS)
    require_range(table, "nanoseconds", 0, LONGEST_NANOSECONDS)
    if unknown := {*table.column("kind").unique().to_pylist()} - {*KINDS}:
        raise PentadError(f"column kind of the Arrow table has {min(unknown)!r}: expected {', '.join(KINDS)}")
    return tuple(map(ProfileEvent._make, rows_of(table)))


def longest(events: Sequence[ProfileEvent], most: int) -> list[ProfileEvent]:
    """At most `most` events, in their order: those whose kinds come first in KINDS, and the longest of a kind."""
    if len(events) <= most:
        return list(events)
    order = sorted(range(len(events)), key=lambda i: (KINDS.index(events[i].kind), -events[i].nanoseconds))
    return [events[index] for index in sorted(order[:most])]


def nested(events: Iterable[ProfileEvent]) -> list[list[ProfileEvent]]:
    """Rows in which any two events nest or do not overlap: a single row for what a thread did."""
    rows, open_ends = list[list[ProfileEvent]](), list[list[int]]()
    for event in sorted(events, key=lambda event: (event.start, -event.nanoseconds)):
        for ends in open_ends:
            while ends and ends[-1] <= event.start:
                ends.pop()
        fits = (at for at, ends in enumerate(open_ends) if not ends or event.end <= ends[-1])
        if (at := next(fits, len(rows))) == len(rows):
            rows.append([])
            open_ends.append([])
        rows[at].append(event)
        open_ends[at].append(event.end)
    return rows


def own_times(events: Iterable[ProfileEvent]) -> Iterator[tuple[ProfileEvent, int]]:
    """Every event with its nanoseconds outside the events that it contains."""
    by_track = defaultdict[int, list[ProfileEvent]](list)
    for event in events:
        by_track[event.track].append(event)
    for row in (row for track in by_track.values() for row in nested(track)):
        own, parents = [event.nanoseconds for event in row], list[int]()
        for index, event in enumerate(row):
            while parents and row[parents[-1]].end <= event.start:
                parents.pop()
            if parents:
                own[parents[-1]] -= event.nanoseconds
            parents.append(index)
        yield from zip(row, own, strict=True)


class OpTime(NamedTuple):
    """The `calls` of a kernel, or an operator, within the instructions of an op, and their seconds."""

    op: str
    name: str
    calls: int
    seconds: float


OUTSIDE = "outside operators"


def op_times(ranks: Iterable[Sequence[ProfileEvent]]) -> tuple[OpTime, ...]:
    """Times of kernels on ranks that have any, and of host operators on the others: each operator without those that it
    calls, and the time of instructions outside of operators. Added up over ranks, the longest first."""
    calls, seconds = dict[tuple[str, str], int](), dict[tuple[str, str], int]()
    for events in ranks:
        kernels = [(event, event.nanoseconds) for event in events if event.kind == KERNEL]
        for event, own in kernels or own_times(event for event in events if event.kind != ASYNC):
            key = event.op, OUTSIDE if event.kind == INSTRUCTION else event.name
            calls[key], seconds[key] = calls.get(key, 0) + 1, seconds.get(key, 0) + own
    found = (OpTime(*key, calls[key], took / 1e9) for key, took in seconds.items())
    return tuple(sorted(found, key=lambda each: (-each.seconds, each.op, each.name)))
