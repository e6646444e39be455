"""Timelines as a trace-event file for Perfetto: ranks are processes, lanes are threads, transfers are arrows."""

from __future__ import annotations

import gzip
import io
import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from types import MappingProxyType
from typing import Any, NamedTuple

from pentad.schedules.draw.palette import nanoseconds, op_style, row_of, row_order, stack_overlaps
from pentad.schedules.simulate.step_profile import ASYNC, KERNEL, ProfileEvent, nested
from pentad.schedules.simulate.timeline import Span, Timeline, grouped

Event = dict[str, Any]
Profiles = Mapping[int, Sequence[ProfileEvent]]  # by rank


class _Slice(NamedTuple):
    """A span with its nanoseconds since the start of the timeline, and the process and thread that show it."""

    span: Span
    start: int
    end: int
    pid: int
    tid: int


def trace_bytes(
    timelines: Sequence[Timeline],
    *,
    process_names: dict[int, str] | None,
    profiles: Profiles = MappingProxyType({}),
) -> bytes:
    """Gzipped JSON; equal timelines give equal bytes. Each timeline starts at time 0, in its own processes.

    `process_names` (rank -> name, such as 'rank 2 (dp0 pp2)') name measured ranks, and simulated ones if those are the
    same ranks. `profiles` belong to ranks of the first timeline and use its clock: each is drawn below the lanes of its
    rank.
    """
    stride = 10 ** len(str(max((span.rank for timeline in timelines for span in timeline.spans), default=0)))
    encode = json.JSONEncoder(separators=(",", ":")).encode
    raw = io.BytesIO()
    with (
        gzip.GzipFile("", "wb", 6, raw, mtime=0) as packed,
        io.TextIOWrapper(packed, encoding="utf-8") as sink,
    ):
        sink.write('{"traceEvents":[')  # no displayTimeUnit: some versions of Perfetto take it for the unit of ts
        separator = "\n"
        for index, timeline in enumerate(timelines):
            # Processes and threads count from 1: trace viewers take 0 for the idle task.
            its = profiles if index == 0 else {}
            for event in _events(timeline, 1 + index * stride, process_names or {}, len(timelines) > 1, its):
                sink.write(separator + encode(event))
                separator = ",\n"
        sink.write("\n]}\n")
    return raw.getvalue()


def _events(
    timeline: Timeline, first_pid: int, names: dict[int, str], several: bool, profiles: Profiles
) -> Iterator[Event]:
    if timeline.source == "simulated" and set(names) != set(timeline.ranks):
        names = {}
    slices: list[_Slice] = []
    starts = (event.start / 1e9 for events in profiles.values() for event in events)
    zero = min(chain((span.start for span in timeline.spans), starts), default=0.0)
    for rank, spans in sorted(grouped(timeline.spans, lambda span: span.rank).items()):
        pid = first_pid + rank
        name = names.get(rank, f"rank {rank}")
        yield _metadata("process_name", pid, pid, name=f"{timeline.source} {name}" if several else name)
        yield _metadata("process_sort_index", pid, pid, sort_index=pid)
        thread = 1000 * pid
        for thread, lane, placed in _threads(spans, zero, pid):
            yield from _named_thread(lane, pid, thread)
            slices += placed
        for tid, (track, events) in enumerate(_profile_threads(profiles.get(rank, ())), thread + 1):
            yield from _named_thread(track, pid, tid)
            for event in events:
                yield _profile_event(event, round(zero * 1e9), pid, tid)
    yield from _ordered(slices, first_pid)


def _named_thread(name: str, pid: int, tid: int) -> Iterator[Event]:
    yield _metadata("thread_name", pid, tid, name=name)
    yield _metadata("thread_sort_index", pid, tid, sort_index=tid)


def _profile_threads(events: Sequence[ProfileEvent]) -> Iterator[tuple[str, list[ProfileEvent]]]:
    """(name, events) of the threads that show what torch's profiler saw on a rank: kernels by stream, operators by host
    thread, then asynchronous work by the host thread that began it. The events of a thread nest."""
    tracks = defaultdict[tuple[int, int], list[ProfileEvent]](list)
    for event in events:
        tracks[{KERNEL: 0, ASYNC: 2}.get(event.kind, 1), event.track].append(event)
    for (kind, track), its in sorted(tracks.items()):
        name = f"{('kernels, stream', 'operators, thread', 'async, thread')[kind]} {track}"
        for level, row in enumerate(nested(its)):
            yield name if level == 0 else f"{name} ({level + 1})", row


def _profile_event(event: ProfileEvent, zero: int, pid: int, tid: int) -> Event:
    times = {"ts": _microseconds(event.start - zero), "dur": _microseconds(event.nanoseconds)}
    what = {"ph": "X", "name": event.name, "cat": event.kind, "pid": pid, "tid": tid, **times}
    return {**what, "args": {"instruction": event.instruction}}


def _metadata(name: str, pid: int, tid: int, /, **args: Any) -> Event:
    return {"ph": "M", "name": name, "pid": pid, "tid": tid, "args": args}


def _threads(spans: list[Span], zero: float, pid: int) -> Iterator[tuple[int, str, list[_Slice]]]:
    """(number, name, slices) of a rank's threads. Overlapping spans of a lane are spread over several threads, because
    the slices of a thread must nest. Thread numbers are unique in the file, because viewers ignore a thread's
    process."""
    lanes = grouped(spans, lambda span: span.lane)
    rows = row_order(row_of(lane) for lane in lanes)
    tid = 1000 * pid
    for lane in sorted(lanes, key=lambda lane: (rows.index(row_of(lane)), lane)):
        timed = sorted(((*nanoseconds(span, zero), span) for span in lanes[lane]), key=lambda item: item[:2])
        levels = [level for level, _ in stack_overlaps([item[:2] for item in timed])]
        for level in range(max(levels) + 1):
            name = lane if level == 0 else f"{lane} ({level + 1})"
            chosen = [item for item, at in zip(timed, levels, strict=True) if at == level]
            yield tid, name, [_Slice(span, start, end, pid, tid) for start, end, span in chosen]
            tid += 1


def _ordered(slices: list[_Slice], first_id: int) -> Iterator[Event]:
    """Slices and arrow ends by time. At equal times an arrow's end follows its slice, and a receive its send."""
    found: list[tuple[int, int, int, int]] = []  # time, order at that time, slice, arrow
    for index, item in enumerate(slices):
        found.append((item.start, 2 if item.span.op.startswith("RECV") else 0, index, -1))
    for arrow, (send, receive) in enumerate(_transfers(slices)):
        found.append((slices[send].start, 1, send, arrow))
        found.append((max(slices[receive].start, slices[receive].end - 1), 3, receive, arrow))
    for time, order, index, arrow in sorted(found):
        if arrow < 0:
            yield _slice_event(slices[index])
        else:
            # The process number distinguishes the arrows of two timelines.
            yield _arrow_event(slices[index], time, (first_id << 32) + arrow, starts=order == 1)


def _transfers(slices: list[_Slice]) -> Iterator[tuple[int, int]]:
    """(send, receive) pairs: for each key, the k-th send with the k-th receive. Activations go to the next stage,
    gradients back."""
    receives: dict[tuple, list[int]] = {}
    sends: dict[tuple, list[int]] = {}
    for index in sorted(range(len(slices)), key=lambda i: slices[i].start):
        span = slices[index].span
        kind = span.op[-1]  # F or B
        if span.op.startswith("RECV"):
            receives.setdefault((span.step, kind, span.stage, span.microbatch, span.peer, span.rank), []).append(index)
        elif span.op.startswith("SEND"):
            stage = span.stage + (1 if kind == "F" else -1)
            sends.setdefault((span.step, kind, stage, span.microbatch, span.rank, span.peer), []).append(index)
    for key, starts in sends.items():
        yield from zip(starts, receives.get(key, ()), strict=False)  # an incomplete recording may lack one of them


def _microseconds(time: int) -> float:
    """Nanoseconds as microseconds. Perfetto multiplies them by 1000 and truncates, which must not lose a nanosecond."""
    value = time / 1000
    return value if value * 1000 >= time else math.nextafter(value, math.inf)


def _slice_event(item: _Slice) -> Event:
    span = item.span
    what = {"ph": "X", "name": span.name, "cat": span.op, "cname": op_style(span.op).cname}
    args = {"stage": span.stage, "microbatch": span.microbatch, "step": span.step}
    if span.peer >= 0:
        args["peer"] = span.peer
    return {**what, **_place(item, item.start), "dur": _microseconds(item.end - item.start), "args": args}


def _arrow_event(item: _Slice, time: int, arrow: int, *, starts: bool) -> Event:
    what = {"ph": "s" if starts else "f", "name": "transfer", "cat": "transfer", "id": arrow}
    return {**what, **_place(item, time), **({} if starts else {"bp": "e"})}


def _place(item: _Slice, time: int) -> Event:
    return {"pid": item.pid, "tid": item.tid, "ts": _microseconds(time)}
