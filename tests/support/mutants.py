"""Correct programs with one defect each, and the instructions that may be reported as culprits."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

from dependency_graph import ranks_of
from reachability_proof import Place, partner

from pentad.schedules.ir.instruction import COLLECTIVES, COMPUTE, RECEIVES, SENDS, Instruction, Overlap, Unit
from pentad.schedules.ir.program import Program, Stream
from pentad.schedules.simulate.dependencies import backward_ops, inputs_of


class Mutant(NamedTuple):
    """A program with a defect. `culprits` are the changed instructions and those that depend on one directly: that wait
    for it, read its result, rendezvous with it, or follow it on its lane. `fatal`: the defect is never harmless."""

    kind: str
    where: str
    program: Program
    culprits: frozenset[Place]
    fatal: bool


Edit = tuple[str, tuple[Unit, ...], Stream, bool]  # kind, units touched, damaged stream, fatal


def dependents(program: Program) -> dict[Place, set[Place]]:
    """Instruction -> itself and those that depend on it directly."""
    found: dict[Place, set[Place]] = defaultdict(set)
    backward = backward_ops(program)
    everywhere = [(rank, unit, part) for rank, s in enumerate(program.streams) for unit in s for part in unit.parts]
    home = {part.key: rank for rank, _, part in everywhere if part.op in COMPUTE}
    last: dict[tuple[int, str], Unit] = {}
    for rank, unit, part in everywhere:
        me = (rank, part.key)
        found[me].add(me)
        for place in [(rank, key) for key in unit.waits] + [(home[k], k) for k in inputs_of(part, program, backward)]:
            found[place].add(me)
        if part.op in SENDS:
            found[me].add(partner(me, part))
            found[partner(me, part)].add(me)
        if part.op in COLLECTIVES:
            found[me] |= {(r, p.key) for r, _, p in everywhere if p.key == part.key}
        for before in last[rank, unit.lane].parts if (rank, unit.lane) in last else ():
            found[rank, before.key].add(me)
        if part is unit.parts[-1]:
            last[rank, unit.lane] = unit
    return found


def mutants(program: Program, *, gated: bool) -> Iterator[Mutant]:
    depends = dependents(program)
    for rank, stream in enumerate(program.streams):
        for index, unit in enumerate(stream):
            edits = [*_moves(stream, index), *_swaps(program, index, rank, depends)]
            for half, part in enumerate(unit.parts):
                edits += _changes(stream, index, half, _fields(part, program, rank, gated=gated))
            for kind, touched, damaged, fatal in edits:
                keys = {(rank, part.key) for one in touched for part in one.parts}
                culprits = keys.union(*(depends.get(key, ()) for key in keys))
                where = f"rank {rank}: {' | '.join(map(str, touched))}"
                yield Mutant(kind, where, with_stream(program, rank, damaged), frozenset(culprits), fatal)


def with_stream(program: Program, rank: int, stream: Stream) -> Program:
    return program.with_streams((*program.streams[:rank], stream, *program.streams[rank + 1 :]))


def _moves(stream: Stream, index: int) -> Iterator[Edit]:
    unit = stream[index]
    yield "dropped", (unit,), stream[:index] + stream[index + 1 :], True
    yield "doubled", (unit,), (*stream[: index + 1], unit, *stream[index + 1 :]), True
    yield "doubled at the end", (unit,), (*stream, unit), True


def _swaps(program: Program, index: int, rank: int, depends: dict[Place, set[Place]]) -> Iterator[Edit]:
    """With the next unit, if that depends on it; with the next one of its lane, if the order of a communicator matters.

    Collectives of one pipeline rank meet only its replicas, which run the same stream: their order is free.
    """
    stream = program.streams[rank]
    unit = stream[index]
    mine = set().union(*(depends[rank, part.key] for part in unit.parts))
    ordered = unit.parts[0].op not in COMPUTE and unit.lane != "compute"
    on_lane = next((k for k in range(index + 1, len(stream)) if stream[k].lane == unit.lane), -1) if ordered else -1
    for other in sorted({index + 1, on_lane} - {-1, len(stream)}):
        reads = any((rank, part.key) in mine for part in stream[other].parts) and _reads(unit, stream[other])
        alone = {ranks_of(program, one) for one in (unit, stream[other]) if one.parts[0].op in COLLECTIVES} == {(rank,)}
        if reads or (other == on_lane and not alone):
            middle = (stream[other], *stream[index + 1 : other], unit)
            yield "swapped", (unit, stream[other]), stream[:index] + middle + stream[other + 1 :], True


def _reads(unit: Unit, later: Unit) -> bool:
    """Whether `later` needs `unit`, rather than just following it on the compute lane."""
    keys = {part.key for part in unit.parts}
    same = {part.key[1:] for part in unit.parts} & {part.key[1:] for part in later.parts}
    return bool(keys & set(later.waits)) or (unit.lane == later.lane == "compute" and bool(same))


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
    unit = stream[index]
    for kind, values, fatal in fields:
        parts = [part._replace(**values) if k == half else part for k, part in enumerate(unit.parts)]
        changed: Unit = Overlap(*parts) if len(parts) == 2 else parts[0]
        touched = [unit, changed]
        if kind == "other slot":  # the next receive into that slot is equally wrong
            slot = unit.parts[0].op, values["slot"]
            touched += [u for u in stream[index + 1 :] if (u.parts[0].op, u.parts[0].slot) == slot][:1]
        yield kind, tuple(touched), (*stream[:index], changed, *stream[index + 1 :]), fatal
