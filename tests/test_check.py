"""`check` accepts what an independent proof accepts, and refuses every damaged program, naming the damage."""

from __future__ import annotations

import re
from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

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
NORM, STEP = Key(Op.NORM, -1, -1), Key(Op.STEP, -1, -1)
compiled = cache(compile_program)


def partner(place: Place, part: Instruction) -> Place:
    """The other end of a send."""
    shift = 1 if part.op is Op.SEND_F else -1
    return part.peer, Key(SENDS[part.op], part.stage + shift, part.microbatch)


# The proof once more, from keys and reachability alone: it shares no code with `check` or `graph`.


class Facts(NamedTuple):
    """`before[place]`: all that has ended before `place` starts, whatever the costs. `home`: rank of a compute key."""

    program: Program
    parts: dict[Place, Instruction]
    before: dict[Place, frozenset[Place]]
    home: dict[Key, int]

    def earlier(self, first: Place, second: Place) -> bool:
        return first in self.before[second]


def prove(program: Program, replicas: int) -> None:
    """Asserts what a step needs."""
    pairs = [((rank, part.key), part) for rank, s in enumerate(program.streams) for unit in s for part in unit.parts]
    parts = dict(pairs)
    assert len(parts) == len(pairs)
    home = {key: rank for rank, key in parts if key.op in COMPUTE}
    assert len(home) == sum(key.op in COMPUTE for _, key in parts)
    facts = Facts(program, parts, _before(program, parts), home)
    for stage in range(program.stages):
        for mb in range(program.microbatches):
            _prove_data(facts, stage, mb)
    for rank in range(program.ranks):
        _prove_end(facts, rank, replicas)
        _prove_slots(facts, rank)


def _before(program: Program, parts: dict[Place, Instruction]) -> dict[Place, frozenset[Place]]:
    together: dict[Place, list[Place]] = defaultdict(list)  # those that happen at the same time
    for (rank, key), part in parts.items():
        if key.op in SENDS:
            other = partner((rank, key), part)
            assert parts[other].peer == rank
            together[rank, key].append(other)
            together[other].append((rank, key))
        elif key.op in COLLECTIVES:
            together[rank, key] += [(r, key) for r in range(program.ranks) if r != rank and (r, key) in parts]
    assert all(len(together[place]) == 1 for place in parts if place[1].op in RECEIVES)
    direct: dict[Place, set[Place]] = {place: set() for place in parts}
    for rank, stream in enumerate(program.streams):
        last: dict[str, set[Place]] = {}
        for unit in stream:
            for part in unit.parts:  # of an overlapped pair, the forward may end before the backward
                before = {(rank, key) for key in part.waits} | last.get(part.lane, set())
                last[part.lane] = {(rank, part.key)}
                for place in ((rank, part.key), *together[rank, part.key]):
                    direct[place] |= before
    return _closure(direct)


def _closure(direct: dict[Place, set[Place]]) -> dict[Place, frozenset[Place]]:
    after: dict[Place, list[Place]] = defaultdict(list)
    for place, earlier in direct.items():
        for one in earlier:
            after[one].append(place)
    left = {place: len(earlier) for place, earlier in direct.items()}
    ready = deque(place for place, count in left.items() if not count)
    closed: dict[Place, frozenset[Place]] = {}
    while ready:
        place = ready.popleft()
        closed[place] = frozenset(direct[place]).union(*(closed[one] for one in direct[place]))
        for one in after[place]:
            left[one] -= 1
            if not left[one]:
                ready.append(one)
    assert len(closed) == len(direct), "deadlock"
    return closed


def _prove_data(facts: Facts, stage: int, mb: int) -> None:
    """F, then BW or B and W, on one rank; what each reads is made there, or sent after it is made and received."""
    backward = {s: Op.BW if Key(Op.BW, s, mb) in facts.home else Op.B for s in range(facts.program.stages)}
    ops = (Op.F, backward[stage]) if backward[stage] is Op.BW else (Op.F, Op.B, Op.W)
    assert {op for op in COMPUTE if Key(op, stage, mb) in facts.home} == set(ops)
    places = [(facts.home[Key(op, stage, mb)], Key(op, stage, mb)) for op in ops]
    rank = places[0][0]
    assert {place[0] for place in places} == {rank}
    assert stage in facts.program.placement[rank]
    assert all(facts.earlier(one, two) for one, two in pairwise(places))
    for reader, near, send in ((places[0], stage - 1, Op.SEND_F), (places[1], stage + 1, Op.SEND_B)):
        if 0 <= near < facts.program.stages:
            key = Key(Op.F if send is Op.SEND_F else backward[near], near, mb)
            made = facts.home[key], key
            assert facts.earlier(made, reader)
            if made[0] != rank:
                sent, received = (made[0], Key(send, near, mb)), (rank, Key(SENDS[send], stage, mb))
                assert (facts.parts[sent].peer, facts.parts[received].peer) == (rank, made[0])
                assert facts.earlier(made, sent)
                assert facts.earlier(received, reader)


def _prove_end(facts: Facts, rank: int, replicas: int) -> None:
    """Gradients of a stage add up in microbatch order and are reduced where shared; then the norm, then the step."""
    mine = [(r, key) for r, key in facts.parts if r == rank]
    assert facts.earlier((rank, NORM), (rank, STEP))
    assert all(facts.earlier(place, (rank, NORM)) for place in mine if place[1].op in COMPUTE)
    assert Counter(key.op for _, key in mine)[Op.STEP] == Counter(key.op for _, key in mine)[Op.NORM] == 1
    for stage in facts.program.placement[rank]:
        gradients = sorted((p for p in mine if p[1].stage == stage and p[1].op in (Op.W, Op.BW)), key=lambda p: p[1][2])
        assert all(facts.earlier(one, two) for one, two in pairwise(gradients))
        if replicas > 1 or len(facts.program.holders(stage)) > 1:
            reduce = (rank, Key(Op.ALL_REDUCE, stage, -1))
            assert all(facts.earlier(place, reduce) for place in gradients)
            assert facts.earlier(reduce, (rank, NORM))
            assert all((holder, reduce[1]) in facts.parts for holder in facts.program.holders(stage))


def _prove_slots(facts: Facts, rank: int) -> None:
    """Of two tensors in one slot, one has been read for the last time before the other is received."""
    held: dict[tuple[Op, int], list[tuple[Place, Place]]] = defaultdict(list)
    for (r, key), part in facts.parts.items():
        if r == rank and key.op in RECEIVES:
            ends = (Op.B, Op.BW) if key.op is Op.RECV_F else (Op.W, Op.BW)
            reader = next((r, Key(op, *key[1:])) for op in ends if (r, Key(op, *key[1:])) in facts.parts)
            assert part.slot >= 0
            held[key.op, part.slot].append(((r, key), reader))
    for uses in held.values():
        for k, (receive, reader) in enumerate(uses):
            for other, other_reader in uses[:k]:
                assert facts.earlier(reader, other) or facts.earlier(other_reader, receive)


# Every program that compiles is right.


def allowed(name: str, ranks: int) -> list[int]:
    """Fewer microbatches than ranks, as many, odd, and many; what the schedule allows of them."""
    if name == "dualpipe":
        return [] if ranks % 2 else [2 * ranks, 2 * ranks + 2, 4 * ranks]
    return sorted({1, max(1, ranks - 1), ranks, ranks + 1, 2 * ranks + 3, 4 * ranks})


@pytest.mark.parametrize("name", CATALOGUE)
@pytest.mark.parametrize("gated", [False, True], ids=["posted", "gated"])
@pytest.mark.parametrize("replicas", [1, 2])
def test_every_program_that_compiles_is_right(name: str, gated: bool, replicas: int) -> None:
    for ranks in (1, 2, 3, 4, 8):
        for microbatches in allowed(name, ranks):
            program = compile_program(name, ranks, microbatches, gated=gated, replicas=replicas)
            check(program, replicas=replicas)
            prove(program, replicas)


# Every damaged program is refused.


class Mutant(NamedTuple):
    """A damaged program. `culprits` are the damaged instructions and those that depend on one directly: that wait for
    it, read its result, meet it, or follow it on its lane. `fatal` where the damage cannot be harmless."""

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
            edits = [*_moves(stream, index), *_swaps(stream, index, rank, depends)]
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


def _swaps(stream: Stream, index: int, rank: int, depends: dict[Place, set[Place]]) -> Iterator[Edit]:
    """With the next unit, if that depends on it; with the next on its lane, if order there is a communicator's."""
    unit = stream[index]
    mine = set().union(*(depends[rank, part.key] for part in unit.parts))
    ordered = unit.parts[0].op not in COMPUTE and unit.lane != "compute"
    on_lane = next((k for k in range(index + 1, len(stream)) if stream[k].lane == unit.lane), -1) if ordered else -1
    for other in sorted({index + 1, on_lane} - {-1, len(stream)}):
        reads = any((rank, part.key) in mine for part in stream[other].parts) and _reads(unit, stream[other])
        if other == on_lane or reads:
            middle = (stream[other], *stream[index + 1 : other], unit)
            yield "swapped", (unit, stream[other]), stream[:index] + middle + stream[other + 1 :], True


def _reads(unit: Unit, later: Unit) -> bool:
    """Whether `later` needs `unit`, and does not just follow it on the compute lane."""
    keys = {part.key for part in unit.parts}
    same = {part.key[1:] for part in unit.parts} & {part.key[1:] for part in later.parts}
    return bool(keys & set(later.waits)) or (unit.lane == later.lane == "compute" and bool(same))


def _fields(part: Instruction, program: Program, rank: int, *, gated: bool) -> Iterator[tuple[str, dict[str, Any], bool]]:
    """What else each field could say."""
    for k in range(len(part.waits)):
        optional = gated and part.op in RECEIVES  # it also says when to launch
        yield "wait removed", {"waits": part.waits[:k] + part.waits[k + 1 :]}, not optional
    if part.op in SENDS or part.op in RECEIVES:
        for peer in {*range(-1, program.ranks + 1)} - {part.peer}:
            yield "other peer", {"peer": peer}, True
    if part.microbatch >= 0:
        for mb in {-1, part.microbatch - 1, part.microbatch + 1, program.microbatches} - {part.microbatch}:
            yield "other microbatch", {"microbatch": mb}, True
    for stage in {*range(-1, program.stages + 1)} - {part.stage}:
        yield "other stage", {"stage": stage}, True
    if part.op in RECEIVES:
        for slot in range(-1, 1 + max(p.slot for u in program.streams[rank] for p in u.parts if p.op is part.op)):
            if slot != part.slot:
                yield "other slot", {"slot": slot}, slot < 0
    if part.group:
        for group in {"", "pp", "stage0", "stage1", "none"} - {part.group}:
            yield "other group", {"group": group}, True


def _changes(stream: Stream, index: int, half: int, fields: Iterator[tuple[str, dict[str, Any], bool]]) -> Iterator[Edit]:
    unit = stream[index]
    for kind, values, fatal in fields:
        parts = [part._replace(**values) if k == half else part for k, part in enumerate(unit.parts)]
        changed: Unit = Overlap(*parts) if len(parts) == 2 else parts[0]
        touched = [unit, changed]
        if kind == "other slot":  # then the next to be received there is as wrong as this
            slot = unit.parts[0].op, values["slot"]
            touched += [u for u in stream[index + 1 :] if (u.parts[0].op, u.parts[0].slot) == slot][:1]
        yield kind, tuple(touched), (*stream[:index], changed, *stream[index + 1 :]), fatal


def names_a_culprit(error: ScheduleError, mutant: Mutant) -> bool:
    """The instruction pointed at is a culprit, or the first sentence has a culprit's key as a word."""
    pointed = mutant.program.streams[error.rank][error.index].parts
    if any((error.rank, part.key) in mutant.culprits for part in pointed):
        return True
    words = set(re.findall(r"\w+", str(error).splitlines()[0]))
    return any(str(key) in words for _, key in mutant.culprits)


SMALL = [(name, *size) for name in CATALOGUE for size in ((4, 8), (2, 4))]


@pytest.mark.parametrize(("name", "ranks", "microbatches"), SMALL)
@pytest.mark.parametrize("gated", [False, True], ids=["posted", "gated"])
def test_every_mutant_is_refused_and_its_culprit_named(name: str, ranks: int, microbatches: int, gated: bool) -> None:
    program = compiled(name, ranks, microbatches, gated=gated, replicas=2)
    kinds: Counter[str] = Counter()
    for mutant in mutants(program, gated=gated):
        try:
            check(mutant.program, replicas=2)
        except ScheduleError as error:
            assert names_a_culprit(error, mutant), (mutant.kind, mutant.where, str(error))
            kinds[mutant.kind] += 1
        else:
            assert not mutant.fatal, (mutant.kind, mutant.where)
            prove(mutant.program, 2)
            kinds["harmless"] += 1
    assert kinds["dropped"] == sum(map(len, program.streams))
