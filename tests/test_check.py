"""`check` accepts what an independent proof accepts, and refuses every damaged program naming the damage."""

from __future__ import annotations

import re
from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pentad.schedules.catalogue import CATALOGUE
from pentad.schedules.check import check
from pentad.schedules.compiler import compile_program
from pentad.schedules.costs import Costs
from pentad.schedules.instruction import COLLECTIVES, COMPUTE, RECEIVES, SENDS, Instruction, Key, Op, Overlap, Unit
from pentad.schedules.order import ScheduleError, backward_ops, inputs_of
from pentad.schedules.program import Program, Stream
from pentad.schedules.simulate import simulate

Place = tuple[int, Key]  # a rank and the key of an instruction there
compiled = cache(compile_program)


# --- The proof, once more: every instruction gets the set of instructions that must have ended before it starts.


def proven(program: Program, replicas: int) -> None:
    """Asserts what a step needs, from keys and reachability alone, sharing no code with `check` or `graph`."""
    units = {(rank, part.key): unit for rank, s in enumerate(program.streams) for unit in s for part in unit.parts}
    parts = {(rank, part.key): part for rank, s in enumerate(program.streams) for unit in s for part in unit.parts}
    assert len(parts) == sum(len(unit.parts) for s in program.streams for unit in s)
    before = _before(program, units, parts)

    def earlier(first: Place, second: Place) -> bool:
        return first in before[second]

    home: dict[Key, int] = {key: rank for rank, key in parts if key.op in COMPUTE}
    assert Counter(key for _, key in parts if key.op in COMPUTE) == Counter(home)
    for stage in range(program.stages):
        for mb in range(program.microbatches):
            ops = sorted(op for op in COMPUTE if Key(op, stage, mb) in home)
            assert ops in (["BW", "F"], ["B", "F", "W"])
            assert len({home[Key(op, stage, mb)] for op in ops}) == 1
            _proven_data(stage, mb, program, home, parts, earlier)
    for rank, stages in enumerate(program.placement):
        _proven_end(rank, stages, program, replicas, parts, earlier)
        _proven_slots(rank, parts, earlier)


def _before(
    program: Program, units: dict[Place, Unit], parts: dict[Place, Instruction]
) -> dict[Place, frozenset[Place]]:
    partners: dict[Place, list[Place]] = defaultdict(list)  # those that happen at the same time
    for (rank, key), part in parts.items():
        if key.op in SENDS:
            other = part.peer, Key(SENDS[key.op], key.stage + (1 if key.op is Op.SEND_F else -1), key.microbatch)
            assert parts[other].peer == rank
            partners[rank, key].append(other)
            partners[other].append((rank, key))
        elif key.op in COLLECTIVES:
            partners[rank, key] += [(r, key) for r in range(program.ranks) if r != rank and (r, key) in parts]
    assert all(len(partners[place]) == 1 for place in parts if place[1].op in RECEIVES)
    direct: dict[Place, set[Place]] = {place: set() for place in parts}
    for rank, stream in enumerate(program.streams):
        last: dict[str, Unit] = {}
        for unit in stream:
            earlier = {(rank, key) for key in unit.waits}
            earlier |= {(rank, part.key) for part in last[unit.lane].parts} if unit.lane in last else set()
            last[unit.lane] = unit
            for part in unit.parts:
                for place in ((rank, part.key), *partners[rank, part.key]):
                    direct[place] |= earlier
    return _closure(direct)


def _closure(direct: dict[Place, set[Place]]) -> dict[Place, frozenset[Place]]:
    after: dict[Place, list[Place]] = defaultdict(list)
    for place, earlier in direct.items():
        for one in earlier:
            after[one].append(place)
    left = {place: len(earlier) for place, earlier in direct.items()}
    ready, closed = deque(place for place, count in left.items() if not count), {}
    while ready:
        place = ready.popleft()
        closed[place] = frozenset(direct[place]).union(*(closed[one] for one in direct[place]))
        for one in after[place]:
            left[one] -= 1
            if not left[one]:
                ready.append(one)
    assert len(closed) == len(direct), "deadlock"
    return closed


def _proven_data(stage, mb, program, home, parts, earlier) -> None:  # type: ignore[no-untyped-def]
    """Results are there before they are read: made on the rank, or sent after they are made and received before."""
    backward = {s: Op.BW if Key(Op.BW, s, mb) in home else Op.B for s in range(program.stages)}
    forward, back = Key(Op.F, stage, mb), Key(backward[stage], stage, mb)
    rank = home[forward]
    assert stage in program.placement[rank]
    assert earlier((rank, forward), (rank, back))
    if back.op is Op.B:
        assert earlier((rank, back), (rank, Key(Op.W, stage, mb)))
    for reader, near, send in ((forward, stage - 1, Op.SEND_F), (back, stage + 1, Op.SEND_B)):
        if not 0 <= near < program.stages:
            continue
        made = Key(Op.F if send is Op.SEND_F else backward[near], near, mb)
        source = home[made]
        assert earlier((source, made), (rank, reader))
        if source != rank:
            sending, receiving = (source, Key(send, near, mb)), (rank, Key(SENDS[send], stage, mb))
            assert (parts[sending].peer, parts[receiving].peer) == (rank, source)
            assert earlier((source, made), sending)
            assert earlier(receiving, (rank, reader))


def _proven_end(rank, stages, program, replicas, parts, earlier) -> None:  # type: ignore[no-untyped-def]
    """Gradients of a stage add up in microbatch order, are reduced where shared, then comes the norm, then the step."""
    mine = [key for r, key in parts if r == rank]
    norm, step = (rank, Key(Op.NORM, -1, -1)), (rank, Key(Op.STEP, -1, -1))
    assert earlier(norm, step)
    assert all(earlier((rank, key), norm) for key in mine if key.op in COMPUTE)
    for stage in stages:
        gradients = [(rank, key) for key in mine if key.stage == stage and key.op in (Op.W, Op.BW)]
        ascending = sorted(gradients, key=lambda place: place[1].microbatch)
        assert all(earlier(one, two) for one, two in zip(ascending, ascending[1:], strict=False))
        if replicas > 1 or len(program.holders(stage)) > 1:
            reduce = (rank, Key(Op.ALL_REDUCE, stage, -1))
            assert all(earlier(place, reduce) for place in gradients)
            assert earlier(reduce, norm)
            assert all((holder, reduce[1]) in parts for holder in program.holders(stage))


def _proven_slots(rank, parts, earlier) -> None:  # type: ignore[no-untyped-def]
    """Of two tensors in one slot, one has been read for the last time before the other is received."""
    held: dict[tuple[Op, int], list[tuple[Place, Place]]] = defaultdict(list)
    for (r, key), part in parts.items():
        if r == rank and key.op in RECEIVES:
            ends = (Op.B, Op.BW) if key.op is Op.RECV_F else (Op.W, Op.BW)
            (reader,) = [(r, Key(op, *key[1:])) for op in ends if (r, Key(op, *key[1:])) in parts]
            assert part.slot >= 0
            held[key.op, part.slot].append(((r, key), reader))
    for uses in held.values():
        for k, (receive, reader) in enumerate(uses):
            for other, other_reader in uses[:k]:
                assert earlier(reader, other) or earlier(other_reader, receive)


# --- Every program that compiles is right.


def allowed(name: str, ranks: int) -> list[int]:
    """Fewer microbatches than ranks, as many, odd, and many; what the schedule allows of them."""
    if name == "dualpipe":
        return [] if ranks % 2 else [2 * ranks, 2 * ranks + 2, 4 * ranks]
    return sorted({1, max(1, ranks - 1), ranks, ranks + 1, 2 * ranks + 3, 4 * ranks})


SIZES = [(name, ranks, m) for name in CATALOGUE for ranks in (1, 2, 3, 4, 8) for m in allowed(name, ranks)]


@pytest.mark.parametrize("name", CATALOGUE)
@pytest.mark.parametrize("gated", [False, True], ids=["posted", "gated"])
@pytest.mark.parametrize("replicas", [1, 2])
def test_every_program_that_compiles_is_right(name: str, gated: bool, replicas: int) -> None:
    for schedule, ranks, microbatches in SIZES:
        if schedule == name:
            program = compile_program(name, ranks, microbatches, gated=gated, replicas=replicas)
            check(program, replicas=replicas)
            proven(program, replicas)


# --- Every damaged program is refused.


class Mutant(NamedTuple):
    """A damaged program. `culprits` are the damaged instruction and those that depend on it directly: that wait for
    it, read its result, meet it, or follow it on its lane. `fatal` where the damage cannot be harmless."""

    kind: str
    where: str
    program: Program
    culprits: frozenset[Place]
    fatal: bool = True


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
        for key in unit.waits:
            found[rank, key].add(me)
        for key in inputs_of(part, program, backward):
            found[home[key], key].add(me)
        if part.op in SENDS:
            other = part.peer, Key(SENDS[part.op], part.stage + (1 if part.op is Op.SEND_F else -1), part.microbatch)
            found[me].add(other)
            found[other].add(me)
        if part.op in COLLECTIVES:
            found[me] |= {(r, p.key) for r, _, p in everywhere if p.key == part.key}
        for before in last[rank, unit.lane].parts if (rank, unit.lane) in last else ():
            found[rank, before.key].add(me)
        if part is unit.parts[-1]:
            last[rank, unit.lane] = unit
    return found


def with_stream(program: Program, rank: int, stream: Stream) -> Program:
    return program.with_streams((*program.streams[:rank], stream, *program.streams[rank + 1 :]))


def edited(unit: Unit, half: int, **fields: object) -> Unit:
    parts = [part._replace(**fields) if k == half else part for k, part in enumerate(unit.parts)]  # type: ignore[arg-type]
    return Overlap(*parts) if len(parts) == 2 else parts[0]


def mutants(program: Program, *, gated: bool) -> Iterator[Mutant]:
    depends = dependents(program)
    for rank, stream in enumerate(program.streams):
        for index, unit in enumerate(stream):
            blamed = frozenset().union(*(depends[rank, part.key] for part in unit.parts))
            for kind, damaged in [*_moved(stream, index), *_swapped(stream, index, rank, depends)]:
                both = frozenset().union(*(depends[rank, p.key] for u in stream if _at(damaged, u, stream) for p in u.parts))
                swap = kind.startswith("swap")
                yield Mutant(kind, f"{rank}: {unit}", with_stream(program, rank, damaged), both if swap else blamed)
            for half, part in enumerate(unit.parts):
                for kind, fields, fatal in _changes(part, program, rank, gated=gated):
                    changed = edited(unit, half, **fields)
                    new = {(rank, p.key) for p in changed.parts}
                    sharing = _sharing(stream, index, changed.parts[half], rank) if kind == "slot" else set()
                    damaged = (*stream[:index], changed, *stream[index + 1 :])
                    where = f"{rank}: {unit} -> {changed}"
                    yield Mutant(kind, where, with_stream(program, rank, damaged), blamed | new | sharing, fatal)
