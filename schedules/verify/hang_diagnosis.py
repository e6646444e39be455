"""Who waits for whom when a run stands still, and who is the cause, from where every rank is in its stream.

A rank tells where it is before each unit. A SEND, a RECV and an ALL_REDUCE only start what goes on by itself; a unit
that waits for one stays until the other end has started it too, and NORM until every rank of the mesh is there; or,
where steps run ahead of their norm, VALIDATE until every rank has reached NORM in the step before. Ranks that share
a layer (tp, cp, ep) wait for each other inside compute units.
So a rank is blocked when another has yet to start something, and a rank that is blocked by none and stays is a cause.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from itertools import product
from typing import NamedTuple

from pentad.schedules.ir.instruction import COLLECTIVES, COMPUTE, RECEIVES, Key, Op, Unit
from pentad.schedules.ir.program import Program
from pentad.schedules.passes.validation import NORM, VALIDATE, is_validated
from pentad.schedules.spec.mesh import Coordinates, Mesh


class Position(NamedTuple):
    """Where a rank is: at unit `counter` of `step`, or at -1 behind that step (behind step -1: before its first one).

    `since` is how many seconds it has been there.
    """

    step: int
    counter: int
    since: float


class Wait(NamedTuple):
    """A blocked rank: its unit lacks a receive that the peer has not sent, or a collective that the peers have not
    joined; of several, the one that the rank waits for first."""

    rank: int
    unit: str
    lacks: Key
    peers: tuple[int, ...]


@dataclass(frozen=True)
class Diagnosis:
    """`roots` are the causes, the one that has stood longest first; `waits` the blocked ranks; `sentence` says it.

    A root is a rank inside a step that lacks nothing, or one between steps for which another waits. When all ranks of
    a NORM have come and it does not end, each may be the cause, and all are roots. `cycle` are ranks of which each
    waits for the next and the last for the first: a program that was proven has none unless a message was lost.
    """

    roots: tuple[int, ...]
    waits: tuple[Wait, ...]
    cycle: tuple[int, ...]
    sentence: str


def find_cause(program: Program, mesh: Mesh, positions: Sequence[Position]) -> Diagnosis:
    """`positions[rank]` is of a rank of the mesh; all are of one moment, or of ranks that no longer move."""
    scene = _Scene(program, mesh, positions)
    lacks = _lacks(scene)
    waits = tuple(Wait(rank, scene.unit(rank), *lacks[rank]) for rank in sorted(lacks))
    awaited = {peer for _, peers in lacks.values() for peer in peers}
    free = {rank for rank, at in enumerate(positions) if rank not in lacks and (at.counter >= 0 or rank in awaited)}
    roots = tuple(sorted(free, key=lambda rank: (-positions[rank].since, rank)))
    cycle = _cycle(waits)
    return Diagnosis(roots, waits, cycle, _sentence(scene, roots, waits, cycle))


class _Scene:
    """The ranks where they are."""

    def __init__(self, program: Program, mesh: Mesh, positions: Sequence[Position]) -> None:
        self.program, self.mesh, self.positions = program, mesh, positions
        self.at = tuple(map(mesh.coordinates, range(mesh.size)))
        self.rank_of = {at: rank for rank, at in enumerate(self.at)}
        self.late: dict[tuple[Coordinates, Key, int], tuple[int, ...]] = {}

    def here(self, rank: int) -> Unit | None:
        """The unit that a rank is at, none between steps."""
        counter = self.positions[rank].counter
        return self.program.streams[self.at[rank].pp][counter] if counter >= 0 else None

    def unit(self, rank: int) -> str:
        here = self.here(rank)
        return "" if here is None else "+".join(str(part.key) for part in here.parts)

    def owes(self, rank: int, key: Key, step: int) -> bool:
        """Whether a rank has yet to run an instruction (no half of a pair) of a step, or is at it."""
        at = self.positions[rank]
        if at.step != step or at.counter < 0:
            return at.step < step
        stream = self.program.streams[self.at[rank].pp]
        return any(stream[index][:3] == key for index in range(at.counter, len(stream)))

    def debtors(self, rank: int, key: Key, ago: int = 0) -> tuple[int, ...]:
        """Who has yet to start what a rank waits for under this key in its own stream, in its step or some `ago`."""
        step = self.positions[rank].step - ago
        if key.op in RECEIVES:
            shift = -1 if key.op is Op.RECV_F else 1
            source = self.rank_of[self.at[rank]._replace(pp=self._source(rank, key))]
            sent = Key(RECEIVES[key.op], key.stage + shift, key.microbatch)
            return (source,) if self.owes(source, sent, step) else ()
        if key.op not in COLLECTIVES:
            return ()  # an own earlier unit: done
        plane = self.at[rank]._replace(dp=0, pp=0, cp=0, ep=0)
        if (plane, key, step) not in self.late:
            members = (self.rank_of[at] for at in self._members(plane, key))
            self.late[plane, key, step] = tuple(sorted(other for other in members if self.owes(other, key, step)))
        return self.late[plane, key, step]

    def _members(self, plane: Coordinates, key: Key) -> list[Coordinates]:
        if key == NORM:
            return list(self.at)
        mesh, holders = self.mesh, self.program.holders(key.stage)
        places = product(range(mesh.dp), holders, range(mesh.cp), range(mesh.ep))
        return [plane._replace(dp=dp, pp=pp, cp=cp, ep=ep) for dp, pp, cp, ep in places]

    def partners(self, rank: int) -> tuple[int, ...]:
        """Who takes part in the operations inside a rank's layers, itself included."""
        return self.mesh.group(("tp", "cp", "ep"), rank)

    def behind(self, rank: int) -> tuple[int, ...]:
        """Those of them who have yet to begin what a rank is at."""
        mine = self.positions[rank]
        late = (other for other in self.partners(rank) if self.positions[other].step <= mine.step)
        return tuple(other for other in late if _progress(self.positions[other]) < _progress(mine))

    def _source(self, rank: int, receive: Key) -> int:
        """Pipeline rank from which a receive, which stands before the rank's own unit, gets its data."""
        stream = self.program.streams[self.at[rank].pp]
        units = (stream[index] for index in range(self.positions[rank].counter, -1, -1))
        return next(unit.parts[0].peer for unit in units if unit[:3] == receive)


def _progress(at: Position) -> tuple[int, float]:
    """How far a rank has come; -1 is the end of a step."""
    return at.step, at.counter if at.counter >= 0 else math.inf


def _lacks(scene: _Scene) -> dict[int, tuple[Key, tuple[int, ...]]]:
    """Blocked rank -> what it lacks, and whose."""
    found, joined = {}, []
    for rank in range(scene.mesh.size):
        unit = scene.here(rank)
        if unit is None:
            continue
        keys = (key for key in unit.waits if key != NORM)  # who is past NORM has all of it
        lacking = ((key, debtors) for key in keys if (debtors := scene.debtors(rank, key)))
        first = next(lacking, None)
        if first:
            found[rank] = first
        elif unit.key == VALIDATE and (late := scene.debtors(rank, NORM, ago=1)):
            found[rank] = (NORM, late)
        elif unit.key == NORM and not is_validated(scene.program):
            joined.append(rank)
        elif (unit.parts[0].op in COMPUTE or unit.key.op is Op.RECOMPUTE) and (late := scene.behind(rank)):
            found[rank] = (unit.key, late)
    there = set(joined)
    for rank in joined:  # a rank that is at NORM, but waits for gradients, has not joined it
        absent = tuple(peer for peer in scene.debtors(rank, NORM) if peer not in there)
        if absent:
            found[rank] = (NORM, absent)
    return found


def _cycle(waits: Sequence[Wait]) -> tuple[int, ...]:
    try:
        TopologicalSorter({wait.rank: wait.peers for wait in waits}).prepare()
    except CycleError as error:
        return tuple(reversed(error.args[1][1:]))  # told from the awaited to the waiting, with one end twice
    return ()


def _sentence(scene: _Scene, roots: Sequence[int], waits: Sequence[Wait], cycle: Sequence[int]) -> str:
    said = []
    direct = [wait for wait in waits if roots and roots[0] in wait.peers]
    if direct:
        said.append(_waiting(scene, max(direct, key=lambda wait: scene.positions[wait.rank].since)))
    if roots:
        stand = _listed([f"{_name(scene, rank)} has been {_place(scene, rank)}" for rank in roots], "")
        said += [f"{stand}: {_blame(scene, roots)}", _behind(roots, waits)]
    if cycle:
        ring = [_waiting(scene, wait) for rank in cycle for wait in waits if wait.rank == rank]
        said.append(f"{_ranks(cycle)} wait for one another in a circle: {_listed(ring, '')}")
    return "; ".join(said) or "no rank is inside a step"


def _blame(scene: _Scene, roots: Sequence[int]) -> str:
    if len(roots) == 1:
        return f"{_ranks(roots)} is the cause"
    shared = all(set(roots) <= set(scene.partners(rank)) for rank in roots)  # each may wait for the others
    together = shared or any(scene.unit(rank) == str(NORM) for rank in roots)
    return f"the cause is among {_ranks(roots)}" if together else f"{_ranks(roots)} are the causes"


def _behind(roots: Sequence[int], waits: Sequence[Wait]) -> str:
    """How many ranks wait for a root, or for a rank that does."""
    waiters: dict[int, list[int]] = {}
    for wait in waits:
        for peer in wait.peers:
            waiters.setdefault(peer, []).append(wait.rank)
    found: set[int] = set()
    left = list(roots)
    while left:
        new = set(waiters.get(left.pop(), ())) - found
        found |= new
        left += new
    number = f"{len(found)} ranks wait" if len(found) > 1 else f"{len(found) or 'no'} rank waits"
    return f"{number} for {'them' if len(roots) > 1 else 'it'}"


def _waiting(scene: _Scene, wait: Wait) -> str:
    peers = _ranks(wait.peers)
    verb = "have" if len(wait.peers) > 1 else "has"
    lack = f"from {peers}" if wait.lacks.op in RECEIVES else f"which {peers} {verb} not joined"
    comma = " " if wait.lacks.op in RECEIVES else ", "
    return f"{_name(scene, wait.rank)} has been {_place(scene, wait.rank)}, waiting for {wait.lacks}{comma}{lack}"


def _place(scene: _Scene, rank: int) -> str:
    at = scene.positions[rank]
    unit = scene.unit(rank)
    if unit:
        newest = max(position.step for position in scene.positions)
        where = f"in {unit}" if at.step == newest else f"in {unit} of step {at.step}"
    else:
        where = f"behind step {at.step}" if at.step >= 0 else "before its first step"
    return f"{where} for {at.since:.0f} s" if at.since >= 10 else f"{where} for {at.since:.1f} s"


def _name(scene: _Scene, rank: int) -> str:
    return f"rank {rank} ({scene.at[rank]})"


def _ranks(ranks: Sequence[int]) -> str:
    return _listed(list(map(str, ranks)), "ranks " if len(ranks) > 1 else "rank ")


def _listed(items: list[str], before: str, most: int = 4) -> str:
    """'a, b and c'; of a longer list the first ones and how many more."""
    shown = items if len(items) <= most else [*items[: most - 1], f"{len(items) - most + 1} more"]
    return before + " and ".join(filter(None, (", ".join(shown[:-1]), shown[-1])))
