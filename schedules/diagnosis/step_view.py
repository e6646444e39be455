"""One step of a timeline beside its program: why each rank's compute lane was idle, in integer nanoseconds.

A gap before a compute action is due to what the action waits for. Until that could have begun on all ranks that take
part, the rank is waiting for a peer; from then on, the gap is exposed communication. What remains is the host's: the
action could have run but had not been issued.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

from pentad.schedules.draw.palette import nanoseconds
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.ir.instruction import COLLECTIVES, OF_ALL_RANKS, RECEIVES, Action, Instruction, Key, Op
from pentad.schedules.ir.program import Program
from pentad.schedules.simulate.timeline import Timeline
from pentad.schedules.spec.mesh import Mesh

BETWEEN_STAGES, PARAMETERS, COPIES, LATE, HOST = "between stages", "parameters", "copies", "late peers", "host"
Interval = tuple[int, int]


class Busy(NamedTuple):
    """A compute-lane action of a rank and, by kind, the nanoseconds for which the lane was idle before it; `last` is
    what it waited for longest, if anything."""

    action: Action
    start: int
    end: int
    idle: dict[str, int]
    last: Key | None


class StepView:
    """`timeline` holds one step over the ranks of the mesh. Raises PentadError if an instruction has no span."""

    def __init__(self, program: Program, mesh: Mesh, timeline: Timeline) -> None:
        self.program, self.mesh = program, mesh
        self.zero = min((span.start for span in timeline.spans), default=0.0)
        self.coordinates = tuple(map(mesh.coordinates, range(mesh.size)))
        named = {(span.rank, span.name): nanoseconds(span, self.zero) for span in timeline.spans}
        self._times = dict[tuple[int, Key], Interval]()
        for rank, at in enumerate(self.coordinates):
            for key, name in program.names[at.pp].items():
                if (rank, name) not in named:
                    raise PentadError(f"the timeline has no {name} of rank {rank}: expected a complete step")
                self._times[rank, key] = named[rank, name]
        self._lanes = [_by_lane(stream) for stream in program.streams]
        self._available = dict[tuple[int, Key], int]()

    def times(self, rank: int, key: Key) -> Interval:
        return self._times[rank, key]

    def action_times(self, rank: int, action: Action) -> Interval:
        """Start and end of both halves of an overlapped pair together."""
        starts, ends = zip(*(self._times[rank, part.key] for part in action.parts), strict=True)
        return min(starts), max(ends)

    def stream(self, rank: int) -> tuple[Action, ...]:
        return self.program.streams[self.coordinates[rank].pp]

    def first_start(self, rank: int) -> int:
        return min(self.action_times(rank, action)[0] for action in self.stream(rank) if action.lane == "compute")

    def end(self, rank: int) -> int:
        """When a rank's step is over: its last action of the compute lane, or the LOSS of an evaluation."""
        last = (each for each in self.stream(rank) if each.lane == "compute" or each.key.op is Op.LOSS)
        return max(self.action_times(rank, action)[1] for action in last)

    def busy(self, rank: int, begin: int) -> Iterator[Busy]:
        """The actions of a rank's compute lane in order, and the LOSS of an evaluation, whose time counts as idle."""
        cursor = begin
        for action in self.stream(rank):
            is_loss = action.key.op is Op.LOSS
            if action.lane != "compute" and not is_loss:
                continue
            start, end = self.action_times(rank, action)
            waits: tuple[Key, ...] = (action.key,) if is_loss else action.waits
            start = max(end if is_loss else start, cursor)
            end = max(start, end)
            last = max(waits, key=lambda key: self._times[rank, key][1], default=None)
            yield Busy(action, start, end, self._idle(rank, last, cursor, start), last)
            cursor = end

    def available(self, rank: int, key: Key) -> int:
        """When a transfer or collective of a rank could begin, because all that take part had the data."""
        if (rank, key) not in self._available:
            self._available[rank, key] = self._find_available(rank, key)
        return self._available[rank, key]

    def sender(self, rank: int, receive: Key) -> tuple[int, Key]:
        """The rank of the mesh and the SEND at the other end of a receive."""
        at, shift = self.coordinates[rank], -1 if receive.op is Op.RECV_F else 1
        peer = self.instruction(rank, receive).peer
        return self.mesh.rank(at._replace(pp=peer)), Key(
            RECEIVES[receive.op], receive.stage + shift, receive.microbatch
        )

    def members(self, rank: int, key: Key) -> tuple[int, ...]:
        """The ranks of the mesh that take part in a collective."""
        if key.op in OF_ALL_RANKS:
            return tuple(range(self.mesh.size))
        at, mesh = self.coordinates[rank], self.mesh
        places = product(range(mesh.dp), self.program.holders(key.stage), range(mesh.cp), range(mesh.ep))
        return tuple(mesh.rank(at._replace(dp=dp, pp=pp, cp=cp, ep=ep)) for dp, pp, cp, ep in places)

    @property
    def size(self) -> int:
        """The number of instructions on all ranks."""
        return len(self._times)

    @property
    def last(self) -> tuple[int, Key]:
        """The instruction that ends last, and its rank."""
        return max(self._times, key=lambda place: self._times[place][1])

    def action(self, rank: int, key: Key) -> Action:
        pp = self.coordinates[rank].pp
        return self.program.streams[pp][self.program.positions[pp][key]]

    def instruction(self, rank: int, key: Key) -> Instruction:
        return next(part for part in self.action(rank, key).parts if part.key == key)

    def _idle(self, rank: int, last: Key | None, begin: int, end: int) -> dict[str, int]:
        if begin == end:
            return {}
        if last is None or (ready := min(end, self._times[rank, last][1])) <= begin or not kind_of(last.op):
            return {HOST: end - begin}
        under_way = self._under_way(rank, last, begin, ready)
        found = {kind_of(last.op): under_way, LATE: ready - begin - under_way, HOST: end - ready}
        return {kind: length for kind, length in found.items() if length}

    def _under_way(self, rank: int, last: Key, begin: int, end: int) -> int:
        """For how long between `begin` and `end` an operation up to `last` on its lane could have been under way."""
        lane = self._lanes[self.coordinates[rank].pp][self.instruction(rank, last).lane]
        total, until = 0, end
        for key in reversed(lane[: lane.index(last) + 1]):
            if self._times[rank, key][1] <= begin:
                break
            start = max(begin, self.available(rank, key))
            stop = min(until, self._times[rank, key][1])
            total += max(0, stop - start)
            until = min(until, max(start, begin))
        return total

    def _find_available(self, rank: int, key: Key) -> int:
        own = self.instruction(rank, key)
        found = max((self._times[rank, each][1] for each in own.waits), default=0)
        if key.op in RECEIVES:
            peer, send = self.sender(rank, key)
            stream, positions = self.stream(peer), self.program.positions[self.coordinates[peer].pp]
            needed = self.instruction(peer, send).waits
            return max(found, *(self.action_times(peer, stream[positions[each]])[1] for each in needed))
        if key.op in COLLECTIVES and own.group:
            return max(self._times[other, key][0] for other in self.members(rank, key))
        return max(found, self._times[rank, key][0])


def kind_of(op: Op) -> str:
    """The kind of time that an operation takes if it runs on a lane other than compute, else ''."""
    if op in RECEIVES:
        return BETWEEN_STAGES
    if op in COLLECTIVES:
        return PARAMETERS
    return COPIES if op in (Op.OFFLOAD, Op.RELOAD) else ""


def _by_lane(stream: tuple[Action, ...]) -> dict[str, list[Key]]:
    found: dict[str, list[Key]] = {}
    for action in stream:
        if action.lane != "compute":
            found.setdefault(action.lane, []).append(action.key)
    return found
