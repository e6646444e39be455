"""What a page of timelines knows about the programs that ran: stored once per program, by the rows of its instructions.

Rows number the instructions of all pipeline ranks, one rank after the other. The page finds the spans of a step by
their names, on as many replicas of the pipeline as the mesh has.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from pentad.schedules.ir.instruction import OF_ALL_RANKS, RECEIVES, SENDS, Instruction, Key, Overlap, instructions_of
from pentad.schedules.ir.program import Program
from pentad.schedules.simulate.memory import activation_changes
from pentad.schedules.spec.mesh import Mesh


class DrawnMemory(NamedTuple):
    """The memory that instructions take, by row: `starts` is the change when one starts and `ends` when it ends, both
    in multiples of `unit`, which is in bytes if `in_bytes`, else in microbatches of all layers of a rank. `held` is
    what each pipeline rank holds throughout, also in multiples; `limit`, in bytes or microbatches, is the most that it
    may hold."""

    in_bytes: bool
    unit: float
    held: Sequence[int]
    starts: Sequence[int]
    ends: Sequence[int]
    limit: float | None = None


class DrawnMessages(NamedTuple):
    """Messages on an axis (tp, cp or ep) inside the layers of an op's instructions on a stage, in planned nanoseconds:
    how long an instruction `takes`, how much of that is exposed communication, and how much communication its compute
    hides."""

    op: str
    stage: int
    axis: str
    takes: int
    exposed: int
    hidden: int


class PathPiece(NamedTuple):
    """A part of a step's critical path, in seconds on the clock of the timeline: the time that an instruction took or
    the delay before it, as `kind` says."""

    rank: int
    name: str
    kind: str
    start: float
    end: float


def saved_activations(program: Program, limit: float | None = None) -> DrawnMemory:
    """The activations that each rank saves: a forward takes memory when it starts, a backward frees it when it ends."""
    unit = 0.5 / (program.chunks * program.slices)
    changes = [round(change / unit) for change in activation_changes(program).tolist()]
    starts, ends = [max(0, change) for change in changes], [min(0, change) for change in changes]
    return DrawnMemory(False, unit, [0] * program.ranks, starts, ends, limit)


def rank_groups(mesh: Mesh) -> dict[str, list[int]]:
    """For each rank of the mesh: its pipeline rank, the pipeline replica within which it transfers, and the group of
    ranks with which it shares collectives."""
    at = [mesh.coordinates(rank) for rank in range(mesh.size)]
    return {
        "pp": [each.pp for each in at],
        "replica": [mesh.rank(each._replace(pp=0)) for each in at],
        "collective": [each.tp for each in at],
    }


def drawn_program(
    program: Program, memory: DrawnMemory | None, kinds: Mapping[str, int], messages: Sequence[DrawnMessages] = ()
) -> dict[str, Any]:
    """The program as JSON data. `kind` has the kind of the spans of each row (`kinds`: by name), `counts` the number of
    rows of each pipeline rank.

    `dependencies` has `count` numbers for each row: how many rows before it each dependency is. `events` are groups of
    rows that run as one: the pairs of `transfers` on each replica, the members of `collectives` on all replicas that
    share them, and those of `everyone` on all ranks. `overlapped` are the first halves of overlapped pairs, whose
    results are available when the pair ends; `slots` is -1 for all but receives. `messages` has one entry for each op
    and stage.
    """
    parts = [list(instructions_of(stream)) for stream in program.streams]
    first = list(accumulate(map(len, parts), initial=0))
    rows = [{part.key: first[rank] + at for at, part in enumerate(some)} for rank, some in enumerate(parts)]
    counts, before = list[int](), list[int]()
    for rank, row, waits in _waits(program, rows):
        counts.append(len(waits))
        before += [row - rows[rank][key] for key in waits]
    return {
        "name": program.name,
        "counts": list(map(len, parts)),
        "kind": [kinds.get(str(part.key), -1) for some in parts for part in some],
        "dependencies": {"count": counts, "before": before},
        "events": _events(parts, rows),
        "overlapped": [
            rows[rank][action.key]
            for rank, stream in enumerate(program.streams)
            for action in stream
            if isinstance(action, Overlap)
        ],
        "slots": [part.slot for some in parts for part in some],
        "memory": memory and memory._asdict(),
        "messages": messages,
    }


def _waits(program: Program, rows: list[dict[Key, int]]) -> Iterator[tuple[int, int, list[Key]]]:
    """(rank, row, what it waits for) of every row. The first half of a pair waits for what either half needs."""
    for rank, stream in enumerate(program.streams):
        for action in stream:
            for part in action.parts:
                waits = action.waits if part is action.parts[0] else part.waits
                yield rank, rows[rank][part.key], list(dict.fromkeys(waits))


def _events(parts: list[list[Instruction]], rows: list[dict[Key, int]]) -> dict[str, list[list[int]]]:
    """The k-th send of a channel meets its k-th receive, and so do the members of a collective."""
    channels: dict[tuple[str, ...], dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, some in enumerate(parts):
        for part in some:
            if channel := _channel(rank, part):
                channels[channel][rank].append(rows[rank][part.key])
    found: dict[str, list[list[int]]] = {"transfers": [], "collectives": [], "everyone": []}
    for (kind, *_), sides in channels.items():
        found[kind] += map(list, zip(*sides.values(), strict=True))
    return found


def _channel(rank: int, part: Instruction) -> tuple[str, ...]:
    if part.op in SENDS:
        return "transfers", part.op, str(rank), str(part.peer)
    if part.op in RECEIVES:
        return "transfers", RECEIVES[part.op], str(part.peer), str(rank)
    if not part.group:
        return ()
    return "everyone" if part.op in OF_ALL_RANKS else "collectives", part.lane, part.group
