"""Diagnoses a run that hangs: which ranks wait for which, and which rank is the cause, from every rank's position.

Each rank reports the action that it is at. SEND, RECV and ALL_REDUCE are only launched: an action that waits for one
blocks until the other ranks have launched it too. NORM (LOSS, in an evaluation) blocks until every rank of the mesh has
reached it; with post-validation VALIDATE blocks instead, until every rank has reached the NORM of the step before.
Ranks that share layers (tp, cp, ep) block each other inside compute actions. A rank in its n-th wait of an action is
blocked by the ranks of that axis that have not begun their n-th, and one that is in no wait is not blocked. A GPU
counts as in its n-th wait until it begins the next one: ranks that wait for it are at later ones. With CUDA graphs and
data-aware groups (of any ranks along dp, ep and cp) waits are not counted; there, and on a GPU before its first wait, a
rank is blocked by those that have not reached its action.

What an unresponsive rank has launched may never have left its process: such a rank blocks all that wait for it, and is
not blocked itself.

So a rank is blocked if another rank has yet to launch something, and a rank that stays at an action without being
blocked is a cause.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from itertools import product
from typing import NamedTuple

from pentad.schedules.ir.errors import enumerated
from pentad.schedules.ir.instruction import COLLECTIVES, COMPUTE, RECEIVES, Action, Key, Op
from pentad.schedules.ir.program import Program
from pentad.schedules.passes.loss_pass import LOSS
from pentad.schedules.passes.post_validation import NORM, VALIDATE, has_post_validation
from pentad.schedules.spec.mesh import LAYER_AXES, Axis, Coordinates, Mesh

GROUP_AXES: tuple[Axis, ...] = ("dp", *LAYER_AXES)  # along which ranks may share layers, with data-aware groups
LISTED = 4  # ranks that a sentence lists at most
LAYER_OPS = COMPUTE | {Op.RECOMPUTE}  # ops that run layers


class Position(NamedTuple):
    """A rank is at action `counter` of `step`, or has completed `step` if `counter` is -1 (step -1: none yet).

    `since` is how many seconds it has been there. `waits` is how many waits for operations inside layers it has begun
    in the action (-1: not known, or on a GPU before the first); `axis` is that of the operation that it waits for now
    ('': none; on a GPU: that of the last one that it has reached).
    """

    step: int
    counter: int
    since: float
    waits: int = -1
    axis: str = ""


class Wait(NamedTuple):
    """A blocked rank: its action waits for the receive or collective `missing`, which `peers` have not sent or joined.

    If several are missing, it is the first that the action waits for. Inside a layer `missing` is the action, and
    `axis` that of the operation if it is known.
    """

    rank: int
    action: str
    missing: Key
    peers: tuple[int, ...]
    axis: str = ""


@dataclass(frozen=True)
class Diagnosis:
    """`causes` are ranks, the longest at its place first; `waits` are the blocked ranks; `sentence` is for people.

    A cause is a rank inside a step that is not blocked, or one between steps for which another waits. If all ranks have
    reached a NORM that does not end, any may be the cause, and all are listed. `cycle` are ranks that each wait for the
    next, the last for the first: a proven program has none unless a message was lost.
    """

    causes: tuple[int, ...]
    waits: tuple[Wait, ...]
    cycle: tuple[int, ...]
    sentence: str


def find_cause(
    program: Program,
    mesh: Mesh,
    positions: Sequence[Position],
    silent: Collection[int] = (),
    inner_axes: tuple[Axis, ...] = LAYER_AXES,
) -> Diagnosis:
    """`positions` has one entry per rank of the mesh, all of the same moment or of ranks that no longer move. `silent`
    are ranks whose process does not answer; ranks along `inner_axes` share layers."""
    run = _Run(program, mesh, positions, frozenset(silent), inner_axes)
    blocked = _blocked(run)
    waits = tuple(_wait(run, rank, *blocked[rank]) for rank in sorted(blocked))
    awaited = {peer for _, peers in blocked.values() for peer in peers}
    causes = {rank for rank, at in enumerate(positions) if rank not in blocked and (at.counter >= 0 or rank in awaited)}
    longest_first = tuple(sorted(causes, key=lambda rank: (-positions[rank].since, rank)))
    cycle = _cycle(waits)
    return Diagnosis(longest_first, waits, cycle, _sentence(run, longest_first, waits, cycle))


def _wait(run: _Run, rank: int, missing: Key, peers: tuple[int, ...]) -> Wait:
    action = run.action(rank)
    inside = action is not None and missing == action.key and missing.op in LAYER_OPS
    return Wait(rank, run.name_of_action(rank), missing, peers, run.positions[rank].axis if inside else "")


class _Run:
    """The program, the mesh and where its ranks are."""

    def __init__(
        self,
        program: Program,
        mesh: Mesh,
        positions: Sequence[Position],
        silent: frozenset[int],
        inner_axes: tuple[Axis, ...],
    ) -> None:
        self.program, self.mesh, self.positions, self.silent = program, mesh, positions, silent
        self.inner_axes = inner_axes
        self.end = LOSS if program.forward_only else NORM  # which all ranks join
        self.coordinates = tuple(map(mesh.coordinates, range(mesh.size)))
        self.rank_of = {at: rank for rank, at in enumerate(self.coordinates)}
        self._not_joined: dict[tuple[Coordinates, Key, int], tuple[int, ...]] = {}

    def action(self, rank: int) -> Action | None:
        """The action that a rank is at; None between steps."""
        counter = self.positions[rank].counter
        return self.program.streams[self.coordinates[rank].pp][counter] if counter >= 0 else None

    def name_of_action(self, rank: int) -> str:
        action = self.action(rank)
        return "" if action is None else "+".join(str(part.key) for part in action.parts)

    def has_yet_to_end(self, rank: int, key: Key, step: int) -> bool:
        """Whether a rank is at a transfer or collective of a step, or before it."""
        at = self.positions[rank]
        if at.step != step or at.counter < 0:
            return at.step < step
        return self.program.positions[self.coordinates[rank].pp][key] >= at.counter

    def missing_peers(self, rank: int, key: Key, steps_ago: int = 0) -> tuple[int, ...]:
        """Ranks that have yet to launch their part of what a rank waits for, in its step or an earlier one."""
        step = self.positions[rank].step - steps_ago
        if key.op in RECEIVES:
            shift = -1 if key.op is Op.RECV_F else 1
            source = self._source(rank, key)
            sent = Key(RECEIVES[key.op], key.stage + shift, key.microbatch)
            return (source,) if self.has_yet_to_end(source, sent, step) else ()
        if key.op not in COLLECTIVES:
            return ()  # an earlier action of its own stream, which has ended
        group = self.coordinates[rank]._replace(dp=0, pp=0, cp=0, ep=0)
        if (group, key, step) not in self._not_joined:
            members = self._members(group, key)
            late = tuple(sorted(other for other in members if self.has_yet_to_end(other, key, step)))
            self._not_joined[group, key, step] = late
        return self._not_joined[group, key, step]

    def silent_peers(self, rank: int, key: Key) -> tuple[int, ...]:
        """Ranks that do not answer and take part in what a rank waits for."""
        if key.op in RECEIVES:
            return tuple(self.silent & {self._source(rank, key)})
        if key.op not in COLLECTIVES:
            return ()
        group = self.coordinates[rank]._replace(dp=0, pp=0, cp=0, ep=0)
        return tuple(sorted(self.silent.intersection(self._members(group, key))))

    def _source(self, rank: int, key: Key) -> int:
        """The sender of what a rank receives."""
        at = self.coordinates[rank]
        receive = self.program.streams[at.pp][self.program.positions[at.pp][key]].parts[0]
        return self.rank_of[at._replace(pp=receive.peer)]

    def awaited(self, action: Action) -> list[Key]:
        """The transfers and collectives that an action blocks for."""
        keys = [key for key in action.waits if key != NORM]  # NORM itself blocks; those that wait for it come later
        if has_post_validation(self.program):
            return [*keys, NORM] if action.key == VALIDATE else keys  # of the step before
        return [*keys, self.end] if action.key == self.end else keys

    def _members(self, group: Coordinates, key: Key) -> list[int]:
        if key == self.end:
            return list(range(self.mesh.size))
        mesh, holders = self.mesh, self.program.holders(key.stage)
        places = product(range(mesh.dp), holders, range(mesh.cp), range(mesh.ep))
        return [self.rank_of[group._replace(dp=dp, pp=pp, cp=cp, ep=ep)] for dp, pp, cp, ep in places]

    def inner_group(self, rank: int) -> tuple[int, ...]:
        """The ranks that share a rank's layers, itself included."""
        return self.mesh.group(self.inner_axes, rank)

    def inner_stragglers(self, rank: int) -> tuple[int, ...]:
        """The ranks that have not reached the operation inside a layer that a rank waits for; where that is not known,
        those of its inner group that have not reached its action."""
        at = self.positions[rank]
        if at.waits < 0:
            return tuple(each for each in self.inner_group(rank) if _progress(self.positions[each]) < _progress(at))
        reached = *_progress(at), at.waits
        peers = self.layer_peers(rank)
        return tuple(each for each in peers if (*_progress(self.positions[each]), self.positions[each].waits) < reached)

    def layer_peers(self, rank: int) -> tuple[int, ...]:
        """The other ranks of the operation inside a layer that a rank waits for."""
        axes = tuple(axis for axis in LAYER_AXES if axis == self.positions[rank].axis)
        return tuple(each for each in self.mesh.group(axes, rank) if each != rank)


def _progress(at: Position) -> tuple[int, float]:
    return at.step, at.counter if at.counter >= 0 else math.inf


def _blocked(run: _Run) -> dict[int, tuple[Key, tuple[int, ...]]]:
    """Blocked rank -> what it waits for, and the peers it waits for."""
    found: dict[int, tuple[Key, tuple[int, ...]]] = {}
    at_end = []
    for rank in range(run.mesh.size):
        action = run.action(rank)
        if action is None:
            continue
        keys = (key for key in action.waits if key != NORM)  # NORM itself blocks; those that wait for it come later
        if first := next(((key, peers) for key in keys if (peers := run.missing_peers(rank, key))), None):
            found[rank] = first
        elif action.key == VALIDATE and (late := run.missing_peers(rank, NORM, steps_ago=1)):
            found[rank] = (NORM, late)
        elif action.key == run.end and not has_post_validation(run.program):
            at_end.append(rank)
        elif action.parts[0].op in LAYER_OPS and (late := run.inner_stragglers(rank)):
            found[rank] = (action.key, late)
    joined = set(at_end)  # without ranks that are at NORM but wait for gradients
    for rank in at_end:
        absent = tuple(peer for peer in run.missing_peers(rank, run.end) if peer not in joined)
        if absent:
            found[rank] = (run.end, absent)
    if run.silent:
        for rank in set(range(run.mesh.size)) - set(found):
            if first := next(_waits_for_silent(run, rank), None):
                found[rank] = first
    return {rank: wait for rank, wait in found.items() if rank not in run.silent}


def _waits_for_silent(run: _Run, rank: int) -> Iterator[tuple[Key, tuple[int, ...]]]:
    """What a rank may wait for although all have launched it, as some of them do not answer."""
    action = run.action(rank)
    if action is None:
        return
    for key in run.awaited(action):
        if peers := run.silent_peers(rank, key):
            yield key, peers
    if peers := tuple(sorted(run.silent.intersection(run.layer_peers(rank)))):
        yield action.key, peers


def _cycle(waits: Sequence[Wait]) -> tuple[int, ...]:
    try:
        TopologicalSorter({wait.rank: wait.peers for wait in waits}).prepare()
    except CycleError as error:
        return tuple(reversed(error.args[1][1:]))  # from the awaited to the waiting rank, the first one twice
    return ()


def _sentence(run: _Run, causes: Sequence[int], waits: Sequence[Wait], cycle: Sequence[int]) -> str:
    parts = []
    direct = [wait for wait in waits if causes and causes[0] in wait.peers]
    if direct:
        parts.append(_describe_wait(run, max(direct, key=lambda wait: run.positions[wait.rank].since)))
    if causes:
        inside = len(causes) > 1  # a single one may have left its last wait
        places = enumerated([f"{_name(run, r)} has been {_place(run, r, inside=inside)}" for r in causes], LISTED)
        parts += [f"{places}: {_blame(run, causes)}", _count_waiting(causes, waits)]
    if cycle:
        ring = [_describe_wait(run, wait) for rank in cycle for wait in waits if wait.rank == rank]
        parts.append(f"{_ranks(cycle)} wait for one another in a circle: {enumerated(ring, LISTED)}")
    return "; ".join(parts) or "no rank is inside a step"


def _blame(run: _Run, causes: Sequence[int]) -> str:
    if len(causes) == 1:
        return f"{_ranks(causes)} is the cause"
    may_wait = any(run.positions[rank].waits < 0 or run.positions[rank].axis for rank in causes)
    one_group = may_wait and all(set(causes) <= set(run.inner_group(rank)) for rank in causes)
    undecided = one_group or any(run.name_of_action(rank) == str(run.end) for rank in causes)
    return f"the cause is among {_ranks(causes)}" if undecided else f"{_ranks(causes)} are the causes"


def _count_waiting(causes: Sequence[int], waits: Sequence[Wait]) -> str:
    """How many ranks wait for a cause, directly or through others."""
    reached = set(causes)
    while new := {wait.rank for wait in waits if not reached.isdisjoint(wait.peers)} - reached:
        reached |= new
    count = len(reached) - len(causes)
    number = f"{count} ranks wait" if count > 1 else f"{count or 'no'} rank waits"
    return f"{number} for {'them' if len(causes) > 1 else 'it'}"


def _describe_wait(run: _Run, wait: Wait) -> str:
    peers = _ranks(wait.peers)
    verb = "have" if len(wait.peers) > 1 else "has"
    missing = f" from {peers}" if wait.missing.op in RECEIVES else f", which {peers} {verb} not joined"
    if wait.axis:
        return f"{_name(run, wait.rank)} has been {_place(run, wait.rank)}, waiting for {peers}"
    return f"{_name(run, wait.rank)} has been {_place(run, wait.rank)}, waiting for {wait.missing}{missing}"


def _place(run: _Run, rank: int, *, inside: bool = True) -> str:
    at = run.positions[rank]
    action = run.name_of_action(rank)
    if action:
        newest = max(position.step for position in run.positions)
        where = f"in {action}" if at.step == newest else f"in {action} of step {at.step}"
        where += f" (in its {at.axis} group)" if at.axis and inside else ""
    else:
        where = f"at the end of step {at.step}" if at.step >= 0 else "before its first step"
    silent = ", without answering," if rank in run.silent else ""
    return f"{where}{silent} for {at.since:.0f} s" if at.since >= 10 else f"{where}{silent} for {at.since:.1f} s"


def _name(run: _Run, rank: int) -> str:
    return f"rank {rank} ({run.coordinates[rank]})"


def _ranks(ranks: Sequence[int]) -> str:
    return f"{'ranks' if len(ranks) > 1 else 'rank'} {enumerated(ranks, LISTED)}"
