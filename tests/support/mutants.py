"""Correct programs with one defect each, and the instructions that may be reported as culprits."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

from dependency_graph import ranks_of
from reachability_proof import Place, partner

from pentad.schedules.ir.instruction import COLLECTIVES, COMPUTE, RECEIVES, SENDS, Action, Instruction, Overlap
from pentad.schedules.ir.program import Program, Stream
from pentad.schedules.simulate.dependencies import data_dependencies


class Mutant(NamedTuple):
    """A program with a defect. `culprits` are the changed instructions and those that depend on one directly: that wait
    for it, read its result, rendezvous with it, or follow it on its lane. `fatal`: the defect is never harmless."""

    kind: str
    where: str
    program: Program
    culprits: frozenset[Place]
    fatal: bool


Edit = tuple[str, tuple[Action, ...], Stream, bool]  # kind, actions touched, damaged stream, fatal


def dependents(program: Program) -> dict[Place, set[Place]]:
    """Instruction -> itself and those that depend on it directly."""
    found: dict[Place, set[Place]] = defaultdict(set)
    everywhere = [
        (rank, action, part) for rank, s in enumerate(program.streams) for action in s for part in action.parts
    ]
    for reader, producer in zip(*data_dependencies(program), strict=True):
        found[_place(program, producer)].add(_place(program, reader))
    last: dict[tuple[int, str], Action] = {}
    for rank, action, part in everywhere:
        me = (rank, part.key)
        found[me].add(me)
        for place in ((rank, key) for key in action.waits):
            found[place].add(me)
        if part.op in SENDS:
            found[me].add(partner(me, part))
            found[partner(me, part)].add(me)
        if part.op in COLLECTIVES:
            found[me] |= {(r, p.key) for r, _, p in everywhere if p.key == part.key}
        for before in last[rank, action.lane].parts if (rank, action.lane) in last else ():
            found[rank, before.key].add(me)
        if part is action.parts[-1]:
            last[rank, action.lane] = action
    return found


def _place(program: Program, row: int) -> Place:
    return program.columns.position(row)[0], program.columns.key(row)


def mutants(program: Program, *, gated: bool) -> Iterator[Mutant]:
    depends = dependents(program)
    for rank, stream in enumerate(program.streams):
        for index, action in enumerate(stream):
            edits = [*_moves(stream, index), *_swaps(program, index, rank, depends)]
            for half, part in enumerate(action.parts):
                edits += _changes(stream, index, half, _fields(part, program, rank, gated=gated))
            for kind, touched, damaged, fatal in edits:
                keys = {(rank, part.key) for one in touched for part in one.parts}
                culprits = keys.union(*(depends.get(key, ()) for key in keys))
                where = f"rank {rank}: {' | '.join(map(str, touched))}"
                yield Mutant(kind, where, with_stream(program, rank, damaged), frozenset(culprits), fatal)


def with_stream(program: Program, rank: int, stream: Stream) -> Program:
    streams = list(program.streams)
    streams[rank] = stream
    return program.with_streams(streams)


def _moves(stream: Stream, index: int) -> Iterator[Edit]:
    action = stream[index]
    yield "dropped", (action,), stream[:index] + stream[index + 1 :], True
    yield "doubled", (action,), (*stream[: index + 1], action, *stream[index + 1 :]), True
    yield "doubled at the end", (action,), (*stream, action), True


def _swaps(program: Program, index: int, rank: int, depends: dict[Place, set[Place]]) -> Iterator[Edit]:
    """Swaps with the next action, if that depends on it; and with the next action of its lane, if the order of a
    communicator matters.

    Collectives of one pipeline rank involve only its replicas, which run the same stream: their order is free.
    """
    stream = program.streams[rank]
    action = stream[index]
    mine = set().union(*(depends[rank, part.key] for part in action.parts))
    ordered = action.parts[0].op not in COMPUTE and action.lane != "compute"
    on_lane = next((k for k in range(index + 1, len(stream)) if stream[k].lane == action.lane), -1) if ordered else -1
    for other in sorted({index + 1, on_lane} - {-1, len(stream)}):
        reads = any((rank, part.key) in mine for part in stream[other].parts) and _reads(action, stream[other])
        alone = {ranks_of(program, one) for one in (action, stream[other]) if one.parts[0].op in COLLECTIVES} == {
            (rank,)
        }
        if reads or (other == on_lane and not alone):
            middle = (stream[other], *stream[index + 1 : other], action)
            yield "swapped", (action, stream[other]), stream[:index] + middle + stream[other + 1 :], True


def _reads(action: Action, later: Action) -> bool:
    """Whether `later` needs `action`, rather than just following it on the compute lane."""
    keys = {part.key for part in action.parts}
    same = {part.key[1:] for part in action.parts} & {part.key[1:] for part in later.parts}
    return bool(keys & set(later.waits)) or (action.lane == later.lane == "compute" and bool(same))


def _fields(
    part: Instruction, program: Program, rank: int, *, gated: bool
) -> Iterator[tuple[str, dict[str, Any], bool]]:
    """Other values for each field."""
    for k in range(len(part.waits)):
        optional = gated and part.op in RECEIVES  # it only affects when to launch
        yield "wait removed", {"waits": part.waits[:k] + part.waits[k + 1 :]}, not optional
    if part.op in SENDS or part.op in RECEIVES:
        for peer in {*range(-1, program.ranks + 1)} - {part.peer}:
            yield "other peer", {"peer": peer}, True
    if part.microbatch >= 0:
        for mb in {part.microbatch - 1, part.microbatch + 1, program.total_slices}:
            yield "other microbatch", {"microbatch": mb}, True
    for stage in {-1, part.stage - 1, part.stage + 1} - {part.stage}:
        yield "other stage", {"stage": stage}, True
    if part.op in RECEIVES:
        for slot in range(-1, 1 + max(p.slot for u in program.streams[rank] for p in u.parts if p.op is part.op)):
            if slot != part.slot:
                yield "other slot", {"slot": slot}, slot < 0
    if part.group:
        for group in {"", "pp", "stage0", "stage1", "none"} - {part.group}:
            yield "other group", {"group": group}, True


def _changes(
    stream: Stream, index: int, half: int, fields: Iterator[tuple[str, dict[str, Any], bool]]
) -> Iterator[Edit]:
    action = stream[index]
    for kind, values, fatal in fields:
        parts = [part._replace(**values) if k == half else part for k, part in enumerate(action.parts)]
        changed: Action = Overlap(*parts) if len(parts) == 2 else parts[0]
        touched = [action, changed]
        if kind == "other slot":  # the next receive into that slot is equally wrong
            slot = action.parts[0].op, values["slot"]
            touched += [u for u in stream[index + 1 :] if (u.parts[0].op, u.parts[0].slot) == slot][:1]
        yield kind, tuple(touched), (*stream[:index], changed, *stream[index + 1 :]), fatal
