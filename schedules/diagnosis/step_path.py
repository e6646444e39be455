"""Why a step took as long as it did: the chain of instructions that leads to its end, by the times at which they ran.

Each instruction is traced back to whatever ended last of what it waited for: its dependencies, the instruction before
it on its lane and, for transfers and collectives, the same on the other ranks that take part (as in
`StepView.available`).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple, cast

from pentad.schedules.diagnosis.attribution import FIRST_START, part_of
from pentad.schedules.diagnosis.step_view import BETWEEN_STAGES, HOST, StepView, kind_of
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.ir.instruction import COLLECTIVES, RECEIVES, SENDS, Action, Key
from pentad.schedules.ir.program import Program
from pentad.schedules.simulate.timeline import Timeline, grouped
from pentad.schedules.spec.mesh import Mesh

Place = tuple[int, Key]  # a rank of the mesh, and one of its instructions
Previous = tuple[dict[Key, Key], ...]  # by pipeline rank, the instruction before each one on its lane


class Piece(NamedTuple):
    """A part of the step's time, in nanoseconds from its first start. An instruction of a rank ran, or moved data, as
    `kind` says (see PARTS in attribution.py); if `kind` is HOST, it could have begun but had not been issued."""

    rank: int
    key: Key
    kind: str
    start: int
    end: int


def step_paths(program: Program, mesh: Mesh, timeline: Timeline) -> dict[int, tuple[Piece, ...]]:
    """The critical path of each step over the ranks of the mesh: pieces that cover the time from its first start to its
    last end without gaps. Steps that did not run this program, in this order, are left out."""
    previous, paths = tuple(map(_previous, program.streams)), dict[int, tuple[Piece, ...]]()
    order = tuple([a.key for a in stream if a.lane == "compute"] for stream in program.streams)
    for step, spans in grouped(timeline.spans, lambda span: span.step).items():
        try:
            view = StepView(program, mesh, Timeline(timeline.source, tuple(spans)))
        except PentadError:
            continue
        if len(spans) == view.size and _is_in_order(view, order):
            paths[step] = _path(view, previous)
    return paths


def _path(view: StepView, previous: Previous) -> tuple[Piece, ...]:
    last = view.last
    at, until, path = cast("Place | None", last), _end(view, last), list[Piece]()
    while at is not None:
        rank, action = at[0], view.action(*at)
        waiting, begin = _begin(view, previous, at)
        at = max(_needed(view, previous, waiting), key=lambda place: _end(view, place), default=None)
        ready = FIRST_START if at is None else min(until, _end(view, at))
        begin = min(max(begin, ready), until)
        path.append(Piece(rank, action.key, _kind(action), begin, until))
        if begin > ready:
            path.append(Piece(*waiting, HOST, ready, begin))
        until = ready
    return tuple(reversed(path))


def _begin(view: StepView, previous: Previous, at: Place) -> tuple[Place, int]:
    """The place whose dependencies decided when an instruction began, and the earliest time at which it can have begun:
    a receive is posted early, and begins once what it waits for has ended; a collective begins when its last member
    does."""
    rank, key = at
    if key.op in RECEIVES:
        return at, FIRST_START
    if key.op not in COLLECTIVES or not view.instruction(rank, key).group:
        return at, view.action_times(rank, view.action(rank, key))[0]

    def start(member: Place) -> tuple[int, int]:
        needed = (_end(view, place) for place in _needed(view, previous, member))
        return view.times(*member)[0], max(needed, default=FIRST_START)

    last = max(((member, key) for member in view.members(rank, key)), key=start)
    return last, start(last)[0]


def _needed(view: StepView, previous: Previous, at: Place) -> Iterator[Place]:
    """What an instruction waits for."""
    rank, key = at
    action, mesh, own = view.action(rank, key), view.mesh, view.coordinates[rank]
    yield from ((rank, each) for each in action.waits)
    if (before := previous[own.pp].get(action.key)) is not None:
        yield rank, before
    if key.op in RECEIVES:
        peer, send = view.sender(rank, key)
        yield from ((peer, each) for each in view.instruction(peer, send).waits)
    elif key.op in COLLECTIVES and (peer := view.instruction(rank, key).peer) >= 0:  # a NORM along a chain of ranks
        yield mesh.rank(own._replace(pp=peer)), key


def _end(view: StepView, at: Place) -> int:
    """When an instruction ended; both halves of an overlapped pair end when the pair does."""
    rank, key = at
    return view.action_times(rank, view.action(rank, key))[1]


def _kind(action: Action) -> str:
    return BETWEEN_STAGES if action.key.op in SENDS else kind_of(action.key.op) or part_of(action.parts[0])


def _previous(stream: tuple[Action, ...]) -> dict[Key, Key]:
    found, last = dict[Key, Key](), dict[str, Key]()
    for action in stream:
        if action.lane in last:
            found[action.key] = last[action.lane]
        last[action.lane] = action.key
    return found


def _is_in_order(view: StepView, order: tuple[list[Key], ...]) -> bool:
    """Whether every rank's compute lane ran in the order of the program."""
    for rank, at in enumerate(view.coordinates):
        starts = [view.times(rank, key)[0] for key in order[at.pp]]
        if any(before > after for before, after in pairwise(starts)):
            return False
    return True
