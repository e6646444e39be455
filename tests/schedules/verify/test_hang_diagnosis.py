"""In simulated runs of entire programs, a diagnosis names exactly the ranks that cause a hang."""

from __future__ import annotations

import time
from collections import defaultdict
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pentad.schedules.compiler import compile_program
from pentad.schedules.ir.instruction import SENDS, Action, Key, Op, parse
from pentad.schedules.ir.program import Program
from pentad.schedules.spec.mesh import Mesh
from pentad.schedules.verify.hang_diagnosis import Position, find_cause

STEPS = 3
NORM = Key(Op.NORM, -1, -1)
compiled = cache(compile_program)


class World:
    """All ranks of a mesh run their streams action by action as workers on CPUs do; some freeze at a given place.

    A SEND arrives at once and blocks nobody; an action blocks until everything that it waits for has arrived, and NORM
    until all ranks of the mesh have reached it. A frozen rank never runs the action at which it is frozen, or never
    begins another step. A rank in `halfway` that is frozen at NORM joins it before it freezes, so the others continue.
    """

    def __init__(
        self, program: Program, mesh: Mesh, frozen: dict[int, tuple[int, int]], halfway: frozenset[int] = frozenset()
    ) -> None:
        self.program, self.mesh, self.frozen, self.halfway = program, mesh, frozen, halfway
        self.at = [(-1, -1)] * mesh.size
        self.reached = [0] * mesh.size
        self.arrived: set[tuple[int, int, Key]] = set()  # (step, receiving rank, its RECV)
        self.joined: dict[tuple[int, Key, int], set[int]] = defaultdict(set)  # key: (step, collective, its lowest rank)
        self.round = 0

    def run(self) -> World:
        """Runs until nothing moves, and for 40 more rounds (seconds)."""
        moved = True
        while moved:
            self.round += 1
            moved = bool([rank for rank in range(self.mesh.size) if self._run_action(rank)])
        self.round += 40
        return self

    def positions(self) -> list[Position]:
        return [Position(*at, since=self.round - then) for at, then in zip(self.at, self.reached, strict=True)]

    def action(self, rank: int) -> Action | None:
        stream = self.program.streams[self.mesh.coordinates(rank).pp]
        return stream[self.at[rank][1]] if self.at[rank][1] >= 0 else None

    def missing_peers(self, rank: int) -> set[int]:
        """The ranks from which the first missing input of a rank must come."""
        action = self.action(rank)
        for key in action.waits if action else ():
            if key.op in SENDS.values() and (self.at[rank][0], rank, key) not in self.arrived:
                return {self.mesh.move(rank, pp=self._receive(rank, key).parts[0].peer)}
            if key.op is Op.ALL_REDUCE and (missing := self._missing(rank, key)):
                return missing
        if action and action.key == NORM:
            ready = {other for other in self._members(rank, NORM) if self._is_ready_for_norm(rank, other)}
            return self._missing(rank, NORM) - ready
        return set()

    def causes(self) -> set[int]:
        """Frozen ranks that are not blocked (those between steps only if another rank waits for them); and all ranks at
        a NORM that all have reached, since nothing tells which of them does not do its part."""
        awaited = {peer for rank in range(self.mesh.size) for peer in self.missing_peers(rank)}
        found = set()
        for rank in range(self.mesh.size):
            action = self.action(rank)
            stopped = self.frozen.get(rank) == self.at[rank]
            at_norm = action is not None and action.key == NORM
            if (stopped or at_norm) and not self.missing_peers(rank) and (action or rank in awaited):
                found.add(rank)
        return found

    def _run_action(self, rank: int) -> bool:
        step, counter = self.at[rank]
        action = self.action(rank)
        if self.frozen.get(rank) == (step, counter):
            if rank in self.halfway and action is not None and action.key == NORM and not self._lacks_input(rank):
                return self._join(rank)
            return False
        if action is None:
            return step + 1 < STEPS and self._advance(rank, step + 1, 0)
        if self._lacks_input(rank):
            return False
        part = action.parts[0]
        if part.op in SENDS:
            shift = 1 if part.op is Op.SEND_F else -1
            peer = self.mesh.move(rank, pp=part.peer)
            self.arrived.add((step, peer, Key(SENDS[part.op], part.stage + shift, part.microbatch)))
        if part.op in (Op.ALL_REDUCE, Op.NORM):
            self._join(rank)
        if part.op is Op.NORM and self._missing(rank, NORM):
            return False
        stream = self.program.streams[self.mesh.coordinates(rank).pp]
        return self._advance(rank, step, counter + 1 if counter + 1 < len(stream) else -1)

    def _advance(self, rank: int, step: int, counter: int) -> bool:
        self.at[rank], self.reached[rank] = (step, counter), self.round
        return True

    def _join(self, rank: int) -> bool:
        """Joins the collective of the rank's action; returns whether the rank had not joined it before."""
        action = self.action(rank)
        assert action is not None
        group = self.joined[self.at[rank][0], action.key, min(self._members(rank, action.key))]
        before = len(group)
        group.add(rank)
        return len(group) > before

    def _lacks_input(self, rank: int) -> bool:
        action = self.action(rank)
        assert action is not None
        received = [key for key in action.waits if key.op in SENDS.values()]
        reduced = [key for key in action.waits if key.op is Op.ALL_REDUCE]
        late = any((self.at[rank][0], rank, key) not in self.arrived for key in received)
        return late or any(self._missing(rank, key) for key in reduced)

    def _receive(self, rank: int, key: Key) -> Action:
        return next(action for action in self.program.streams[self.mesh.coordinates(rank).pp] if action.key == key)

    def _members(self, rank: int, key: Key) -> set[int]:
        if key == NORM:
            return set(range(self.mesh.size))
        holders = self.program.holders(key.stage)
        return {self.mesh.move(rank, dp=dp, pp=pp) for dp in range(self.mesh.dp) for pp in holders}

    def _missing(self, rank: int, key: Key) -> set[int]:
        members = self._members(rank, key)
        return members - self.joined[self.at[rank][0], key, min(members)]

    def _is_ready_for_norm(self, rank: int, other: int) -> bool:
        """Whether another rank is at the same NORM and waits for nothing else."""
        action = self.action(other)
        same = action is not None and action.key == NORM and self.at[other][0] == self.at[rank][0]
        return same and not self._lacks_input(other)


def place(program: Program, mesh: Mesh, rank: int, where: str) -> tuple[int, int]:
    """(step, counter) of a place: '1:2F0' is 2F0 of step 1, '1:' the end of step 1."""
    step, _, text = where.partition(":")
    if not text:
        return int(step), -1
    actions = program.streams[mesh.coordinates(rank).pp]
    keys = [part.key for part in parse(text).parts]
    return int(step), next(i for i, action in enumerate(actions) if [part.key for part in action.parts] == keys)


def hang(name: str, dp: int, pp: int, microbatches: int, frozen: dict[int, str]) -> World:
    program, mesh = compiled(name, pp, microbatches, replicas=dp), Mesh(dp=dp, pp=pp)
    return World(program, mesh, {rank: place(program, mesh, rank, where) for rank, where in frozen.items()}).run()


GOLDEN = [
    ("1f1b", 1, 4, 8, {1: "0:1F6"}, (1,), "rank 1 (dp0 pp1) has been in 1F6 for "),
    ("1f1b", 1, 4, 8, {2: "1:2BW3"}, (2,), "waiting for 1RECV_B3 from rank 2"),
    ("1f1b", 1, 4, 8, {0: "0:0SEND_F5"}, (0,), "waiting for 1RECV_F5 from rank 0"),
    ("1f1b", 1, 4, 8, {3: "0:3RECV_F4"}, (3,), "rank 3 is the cause; 3 ranks wait for it"),
    ("1f1b", 1, 4, 8, {3: "0:"}, (3,), "rank 3 (dp0 pp3) has been at the end of step 0 for "),
    ("1f1b", 1, 4, 8, {0: "-1:"}, (0,), "rank 0 (dp0 pp0) has been before its first step for "),
    ("1f1b", 2, 2, 4, {1: "0:0ALL_REDUCE"}, (1,), "waiting for NORM, which ranks 0 and 1 have not joined"),
    ("1f1b", 2, 2, 4, {2: "1:STEP"}, (2,), "rank 2 (dp0 pp1) has been in STEP of step 1 for "),
    ("1f1b", 2, 2, 4, {2: "2:STEP"}, (2,), "rank 2 is the cause; no rank waits for it"),
    ("1f1b", 2, 2, 4, {1: "2:NORM"}, (2, 3, 0, 1), "the cause is among ranks 2, 3, 0 and 1; no rank waits for them"),
    ("1f1b", 2, 2, 4, {0: "0:NORM", 1: "0:0BW2"}, (1,), "rank 1 is the cause; 3 ranks wait for it"),
    ("1f1b", 2, 4, 8, {0: "0:0F3", 3: "0:1BW2"}, (0, 3), "ranks 0 and 3 are the causes; 6 ranks wait for them"),
    ("1f1b", 2, 4, 8, {0: "0:0F3", 2: "0:1F6"}, (0,), "rank 0 is the cause; 7 ranks wait for it"),
    ("zb-h2", 1, 4, 8, {2: "1:2W5"}, (2,), "rank 2 is the cause; 3 ranks wait for it"),
    ("zb-h2", 2, 4, 8, {5: "2:2SEND_B1"}, (5,), "waiting for 3RECV_F4 from rank 5"),
    ("zb-v", 1, 4, 8, {3: "0:4F2"}, (3,), "rank 3 is the cause; 3 ranks wait for it"),
    ("zb-v", 2, 2, 4, {0: "0:3B1"}, (0,), "rank 0 is the cause; 3 ranks wait for it"),
    ("dualpipe", 1, 4, 8, {1: "1:(1F3+2BW5)"}, (1,), "rank 1 (dp0 pp1) has been in 1F3+2BW5"),
    ("dualpipe", 2, 4, 8, {6: "0:0ALL_REDUCE"}, (6,), "0ALL_REDUCE, which rank 6 has not joined"),
]


@pytest.mark.parametrize(("name", "dp", "pp", "microbatches", "frozen", "causes", "says"), GOLDEN)
def test_the_diagnosis_names_the_ranks_that_hang(
    name: str, dp: int, pp: int, microbatches: int, frozen: dict[int, str], causes: tuple[int, ...], says: str
) -> None:
    world = hang(name, dp, pp, microbatches, frozen)
    diagnosis = find_cause(world.program, world.mesh, world.positions())
    assert diagnosis.causes == causes and set(causes) == world.causes() and diagnosis.cycle == ()
    assert says in diagnosis.sentence


def test_the_sentence_names_ranks_waits_peers_and_seconds() -> None:
    program = compiled("1f1b", 4, 8)
    where = [(0, "0:0BW5", 40.4), (1, "0:1F7", 41.0), (2, "0:2F7", 12.0), (3, "0:3F7", 2.25)]
    at = [Position(*place(program, Mesh(pp=4), rank, text), since) for rank, text, since in where]
    assert find_cause(program, Mesh(pp=4), at).sentence == (
        "rank 0 (dp0 pp0) has been in 0BW5 for 40 s, waiting for 0RECV_B5 from rank 1; "
        "rank 1 (dp0 pp1) has been in 1F7 for 41 s: rank 1 is the cause; 3 ranks wait for it"
    )


def test_a_rank_that_is_past_norm_does_not_wait_for_one_that_has_joined_it() -> None:
    program = compiled("1f1b", 2, 4)
    at = [Position(*place(program, Mesh(pp=2), rank, where), 9.0) for rank, where in ((0, "0:STEP"), (1, "0:NORM"))]
    diagnosis = find_cause(program, Mesh(pp=2), at)
    assert (diagnosis.causes, diagnosis.waits) == ((0, 1), ())


def test_a_long_list_of_ranks_is_cut() -> None:
    at = [Position(0, 0, 3.0)] * 8
    assert find_cause(compiled("1f1b", 2, 4, replicas=4), Mesh(dp=4, pp=2), at).sentence.endswith(
        "and 5 more: ranks 0, 1, 2 and 5 more are the causes; no rank waits for them"
    )


SIZES = [("1f1b", 1, 4, 6), ("1f1b", 2, 2, 4), ("zb-h2", 1, 4, 8), ("zb-h2", 2, 4, 5), ("dualpipe", 1, 4, 8)]
SIZES += [("dualpipe", 2, 2, 6), ("dualpipe", 2, 4, 8), ("zb-v", 1, 4, 6), ("zb-v", 2, 2, 3), ("gpipe", 3, 1, 2)]


@st.composite
def hangs(draw: st.DrawFn) -> World:
    """One to three ranks frozen anywhere, even between steps; some of those frozen at NORM have joined it."""
    name, dp, pp, microbatches = draw(st.sampled_from(SIZES))
    program, mesh = compiled(name, pp, microbatches, replicas=dp), Mesh(dp=dp, pp=pp)
    frozen = {}
    for rank in draw(st.sets(st.integers(0, mesh.size - 1), min_size=1, max_size=3)):
        stream = program.streams[mesh.coordinates(rank).pp]
        norm = next(index for index, action in enumerate(stream) if action.key == NORM)
        counter = draw(st.one_of(st.integers(-1, len(stream) - 1), st.just(norm)))
        frozen[rank] = (draw(st.integers(0, STEPS - 1)), counter)
    return World(program, mesh, frozen, frozenset(rank for rank in sorted(frozen) if draw(st.booleans())))


@given(hangs())
@settings(max_examples=4 * settings().max_examples)
def test_all_frozen_ranks_that_are_not_blocked_are_causes_and_every_wait_is_right(world: World) -> None:
    world.run()
    diagnosis = find_cause(world.program, world.mesh, world.positions())
    assert set(diagnosis.causes) == world.causes()
    since = [world.positions()[rank].since for rank in diagnosis.causes]
    assert since == sorted(since, reverse=True)
    blocked = {rank: world.missing_peers(rank) for rank in range(world.mesh.size) if world.missing_peers(rank)}
    assert {wait.rank: set(wait.peers) for wait in diagnosis.waits} == blocked
    assert diagnosis.cycle == ()


@given(st.lists(st.tuples(st.integers(3, 4), st.floats(0, 1)), min_size=8, max_size=8))
def test_every_rank_inside_a_step_is_blocked_or_a_cause_wherever_they_are(scattered: list[tuple[int, float]]) -> None:
    program, mesh = compiled("zb-h2", 4, 5, replicas=2), Mesh(dp=2, pp=4)
    at = []
    for rank, (step, share) in enumerate(scattered):
        actions = len(program.streams[mesh.coordinates(rank).pp])
        at.append(Position(step, int(share * actions) - 1, 1.0))
    diagnosis = find_cause(program, mesh, at)
    blocked = {wait.rank for wait in diagnosis.waits}
    inside = {rank for rank, position in enumerate(at) if position.counter >= 0}
    assert inside <= blocked | set(diagnosis.causes) and not blocked & set(diagnosis.causes)


def test_no_rank_is_a_cause_if_all_are_between_steps() -> None:
    at = [Position(3, -1, 5.0), *[Position(4, -1, 1.0)] * 3]
    diagnosis = find_cause(compiled("1f1b", 4, 8), Mesh(pp=4), at)
    assert (diagnosis.causes, diagnosis.waits, diagnosis.sentence) == ((), (), "no rank is inside a step")


def test_a_cycle_of_waits_is_reported() -> None:
    """Rank 0 waits for a gradient before it sends the activation that leads to it, as no proven program does."""
    program, mesh = compiled("1f1b", 2, 4), Mesh(pp=2)
    first = [Key(Op.RECV_B, 0, 0), Key(Op.BW, 0, 0)]
    stream = tuple(sorted(program.streams[0], key=lambda action: action.key not in first))
    broken = program.with_streams((stream, program.streams[1]))
    diagnosis = find_cause(broken, mesh, World(broken, mesh, {}).run().positions())
    assert diagnosis.causes == () and set(diagnosis.cycle) == {0, 1}
    assert "wait for one another in a circle" in diagnosis.sentence
    assert "waiting for 1RECV_F0 from rank 0" in diagnosis.sentence
    assert "waiting for 0RECV_B0 from rank 1" in diagnosis.sentence


@pytest.mark.quiet
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("name", "dp", "pp"), [("zb-h2", 1, 64), ("1f1b", 8, 8), ("gpipe", 64, 1), ("dualpipe", 2, 32)]
)
def test_a_diagnosis_of_64_ranks_takes_less_than_10_ms(name: str, dp: int, pp: int) -> None:
    program, mesh = compiled(name, pp, 64, replicas=dp), Mesh(dp=dp, pp=pp)
    frozen = mesh.size // 2
    middle = len(program.streams[mesh.coordinates(frozen).pp]) // 2
    at = World(program, mesh, {frozen: (0, middle)}).run().positions()
    took = []
    for _ in range(20):
        begin = time.thread_time()
        assert find_cause(program, mesh, at).causes == (frozen,)
        took.append(time.thread_time() - begin)
    assert min(took) < 10e-3
