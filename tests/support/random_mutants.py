"""Correct programs with one random defect each, cheap enough to draw tens of thousands."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random
from typing import Any

from mutants import with_stream

from pentad.schedules.ir.instruction import RECEIVES, SENDS, Action, Key, Overlap
from pentad.schedules.ir.program import Program, Stream

Damage = Callable[[Random, Program, Stream, int], Stream | None]


def dropped(random: Random, program: Program, stream: Stream, at: int) -> Stream:
    return stream[:at] + stream[at + 1 :]


def doubled(random: Random, program: Program, stream: Stream, at: int) -> Stream:
    to = random.randrange(len(stream) + 1)
    return (*stream[:to], stream[at], *stream[to:])


def swapped(random: Random, program: Program, stream: Stream, at: int) -> Stream | None:
    to = min(at + random.randint(1, 6), len(stream) - 1)
    return (*stream[:at], stream[to], *stream[at + 1 : to], stream[at], *stream[to + 1 :]) if to > at else None


def other_peer(random: Random, program: Program, stream: Stream, at: int) -> Stream | None:
    part = stream[at].parts[0]
    if part.op not in SENDS and part.op not in RECEIVES:
        return None
    return _with(
        stream, at, 0, peer=random.choice([rank for rank in range(-1, program.ranks + 1) if rank != part.peer])
    )


def other_microbatch(random: Random, program: Program, stream: Stream, at: int) -> Stream | None:
    half = random.randrange(len(stream[at].parts))
    now = stream[at].parts[half].microbatch
    others = [mb for mb in range(-1, program.total_slices + 1) if mb != now]
    return _with(stream, at, half, microbatch=random.choice(others)) if now >= 0 else None


def wait_removed(random: Random, program: Program, stream: Stream, at: int) -> Stream | None:
    half = random.randrange(len(stream[at].parts))
    waits = stream[at].parts[half].waits
    gone = random.randrange(len(waits)) if waits else 0
    return _with(stream, at, half, waits=waits[:gone] + waits[gone + 1 :]) if waits else None


def wait_changed(random: Random, program: Program, stream: Stream, at: int) -> Stream | None:
    half = random.randrange(len(stream[at].parts))
    waits = list(stream[at].parts[half].waits)
    if not waits:
        return None
    other = random.choice(stream).parts[0].key
    waits[random.randrange(len(waits))] = random.choice([other, Key(other.op, other.stage, other.microbatch + 1)])
    return _with(stream, at, half, waits=tuple(waits))


def other_lane(random: Random, program: Program, stream: Stream, at: int) -> Stream | None:
    """Swaps an action with the next one of its lane."""
    lane = stream[at].lane
    to = next((k for k in range(at + 1, len(stream)) if stream[k].lane == lane), None)
    if to is None or lane == "compute":
        return None
    return (*stream[:at], stream[to], *stream[at + 1 : to], stream[at], *stream[to + 1 :])


def other_slot(random: Random, program: Program, stream: Stream, at: int) -> Stream | None:
    part = stream[at].parts[0]
    if part.op not in RECEIVES:
        return None
    return _with(stream, at, 0, slot=random.choice([slot for slot in range(-1, 4) if slot != part.slot]))


KINDS: tuple[Damage, ...] = (
    *(dropped, doubled, swapped, other_peer, other_microbatch),
    *(wait_removed, wait_changed, other_lane, other_slot),
)


def random_mutants(program: Program, seed: str, count: int) -> Iterator[tuple[str, Program]]:
    """Yields (kind of defect, defective program), with all kinds equally often."""
    random, made = Random(seed), 0
    while made < count:
        damage = KINDS[made % len(KINDS)]
        rank = random.randrange(program.ranks)
        stream = program.streams[rank]
        found = damage(random, program, stream, random.randrange(len(stream)))
        if found is not None and found != stream:
            made += 1
            yield damage.__name__, with_stream(program, rank, found)


def _with(stream: Stream, at: int, half: int, **values: Any) -> Stream:
    parts = list(stream[at].parts)
    parts[half] = parts[half]._replace(**values)
    changed: Action = Overlap(*parts) if len(parts) == 2 else parts[0]
    return (*stream[:at], changed, *stream[at + 1 :])
