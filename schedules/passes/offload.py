"""Pass: activations are copied to host memory after their forward and come back for their backward (OFFLOAD, RELOAD).

OFFLOAD comes right after the forward. Its copy runs beside later compute, and the later compute instruction that takes
over the memory waits for it. OFFLOAD (for the part of a cut tensor that stays) and RELOAD may themselves take over
memory from compute, and then wait for that.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import NamedTuple

import numpy as np

from pentad.schedules.ir.columns import CODE, Array, Columns, key_columns, op_mask
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.ir.instruction import COMPUTE, Instruction, Op
from pentad.schedules.ir.lookup import IS_BACKWARD, IS_COMPUTE, IS_FORWARD
from pentad.schedules.ir.program import Program, Stream
from pentad.schedules.ir.rewrite import insert_rows
from pentad.schedules.simulate.memory import SAVED_CHANGE

EARLIEST = 2  # how many compute actions before its use a reload starts, if memory allows
_ON_COMPUTE_LANE = IS_COMPUTE | op_mask({Op.RECOMPUTE})
_Cell = tuple[int, int]  # stage, microbatch


class RoundTrips(NamedTuple):
    """Activations that go to the host and come back, as arrays: rows of their forwards and of their backwards, the
    actions (numbered through all ranks) that take over their memory, and those before which they come back."""

    forward: Array
    backward: Array
    release: Array
    reload: Array


class _RoundTrip(NamedTuple):
    """One round trip; `release` and `reload` are indices of actions in a stream."""

    cell: _Cell
    release: int
    reload: int


def add_offload(program: Program, stages: Collection[int], prefetch: int = 1) -> Program:
    """Adds OFFLOAD and RELOAD for every microbatch of these stages, except where the backward follows so soon after the
    forward that a copy would free no memory in time.

    At most `prefetch` compute actions of these stages run beside an OFFLOAD, and the next one waits for it; a RELOAD
    starts as many of them before the backward. Stages that the program does not have are ignored.
    """
    return _inserted(program, round_trips(program, stages, prefetch))


def round_trips(program: Program, stages: Collection[int], prefetch: int = 1) -> RoundTrips:
    """The round trips that `add_offload` inserts."""
    columns, rows = program.columns, program.lookup
    # Only their compute counts: that of others, such as an embedding, may be too short to hide a copy.
    copied = np.isin(columns.stage, list(stages))
    inner = np.zeros(len(columns.action_row), bool)
    inner[columns.action[copied & IS_COMPUTE[columns.op]]] = True
    so_far, compute = np.cumsum(inner), np.flatnonzero(inner)  # numbered through all ranks as well
    forward = np.flatnonzero(copied & IS_FORWARD[columns.op])
    backward = rows.backward[rows.cell(forward)]
    reader = np.append(rows.forward, np.full(rows.total_slices, -1))[rows.cell(forward) + rows.total_slices]
    reads = (reader >= 0) & (columns.rank[reader] == columns.rank[forward])  # the next stage is on this rank
    after = so_far[columns.action[forward]] + prefetch
    release = np.maximum(after, reads * so_far[columns.action[reader]])
    reload = so_far[columns.action[backward]] - 1 - prefetch
    found = np.flatnonzero(release < reload)
    return RoundTrips(forward[found], backward[found], compute[release[found]], compute[reload[found]])


def add_offload_beyond(program: Program, max_resident: float) -> Program:
    """Adds OFFLOAD and RELOAD so that no rank has more than `max_resident` activations, in microbatches of a whole
    rank, on its device at once. The activation whose backward comes last is offloaded first (Belady 1966).

    RELOAD goes EARLIEST compute actions before the backward, or later if there is no room. Activations that are
    recomputed are not offloaded. Raises PentadError if a rank needs more at once.
    """
    found: list[tuple[int, ...]] = []
    chunks = program.chunks * program.slices  # activations in one microbatch of a whole rank
    for rank, (stream, first) in enumerate(zip(program.streams, program.columns.action_offsets.tolist(), strict=False)):
        residency = _Residency(_Walk(stream), max_resident * chunks)
        found += ((*trip.cell, first + trip.release, first + trip.reload) for trip in residency.round_trips())
        if residency.shortage:
            expected = f"at least {residency.shortage / chunks:g}, which rank {rank} saves at once"
            raise PentadError(f"memory.max_resident_microbatches is {max_resident:g}: expected {expected}")
    stage, microbatch, release, reload = np.array(found, int).reshape(-1, 4).T
    cell = stage * program.total_slices + microbatch
    return _inserted(program, RoundTrips(program.lookup.forward[cell], program.lookup.backward[cell], release, reload))


def _inserted(program: Program, trips: RoundTrips) -> Program:
    """The program with these OFFLOADs and RELOADs, in the order of backwards where several go to one position, and with
    the waits for them."""
    columns, count = program.columns, len(trips.forward)
    forward, backward, release, reload = (each[np.argsort(trips.backward)] for each in trips)
    rank, (_, stage, microbatch), begins = columns.rank[forward], columns.keys(forward), _begins(program)
    at, whole = begins[reload], np.array([0, 2 * count])
    op = np.repeat([CODE[Op.OFFLOAD], CODE[Op.RELOAD]], count)
    added = key_columns(whole, op, np.tile(stage, 2), np.tile(microbatch, 2))
    offload, both = np.full(count, CODE[Op.OFFLOAD]), np.stack((np.arange(count), count + np.arange(count)), axis=1)
    of_forward, parts = _parts(columns, columns.action[forward])
    of_reload, last = _parts(columns, _last_before(columns, at))
    added = added.with_waits(of_forward, *columns.keys(parts))  # RELOAD waits for its OFFLOAD and for compute
    added = added.with_waits(both[:, 1], offload, stage, microbatch).with_waits(count + of_reload, *columns.keys(last))
    recompute = program.lookup.rows(rank, CODE[Op.RECOMPUTE], stage, microbatch)
    waiting = np.stack((columns.action_row[begins[release]], np.where(recompute < 0, backward, recompute)), axis=1)
    keys = np.tile([CODE[Op.OFFLOAD], CODE[Op.RELOAD]], count), np.repeat(stage, 2), np.repeat(microbatch, 2)
    before = columns.row_before(np.concatenate((columns.action[forward] + 1, at)))
    columns = columns.with_waits(waiting.ravel(), *keys)
    return program.with_streams(insert_rows(columns, added, np.tile(rank, 2), before))


def _begins(program: Program) -> Array:
    """Where each action begins: a backward at its recomputation, if it has one."""
    columns, backwards = program.columns, program.columns.rows_of(IS_BACKWARD)
    _, stage, microbatch = columns.keys(backwards)
    recompute = program.lookup.rows(columns.rank[backwards], CODE[Op.RECOMPUTE], stage, microbatch)
    found, has = np.arange(len(columns.action_row)), recompute >= 0
    found[columns.action[backwards[has]]] = columns.action[recompute[has]]
    return found


def _last_before(columns: Columns, actions: Array) -> Array:
    """The last action on the compute lane before each of these."""
    on_lane = np.flatnonzero(_ON_COMPUTE_LANE[columns.op[columns.action_row]])
    found: Array = on_lane[np.searchsorted(on_lane, actions) - 1]
    return found


def _parts(columns: Columns, actions: Array) -> tuple[Array, Array]:
    """(indices into `actions`, rows) of the one or two parts of each."""
    row = columns.action_row[actions]
    index = np.repeat(np.arange(len(actions)), 1 + np.append(columns.is_second, False)[row + 1])
    second = np.append(False, index[1:] == index[:-1])[: len(index)]
    return index, row[index] + second


class _Walk:
    """A rank's stream, with the indices of its compute actions, and of each cell's forward, recomputation and
    backward."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        parts = [(index, part) for index, action in enumerate(stream) for part in action.parts]
        self.forward = {(p.stage, p.microbatch): index for index, p in parts if p.op is Op.F}
        self.recompute = {(p.stage, p.microbatch): index for index, p in parts if p.op is Op.RECOMPUTE}
        self.backward = {(p.stage, p.microbatch): index for index, p in parts if p.op in (Op.B, Op.BW)}
        self.compute = [index for index, action in enumerate(stream) if action.parts[0].op in COMPUTE]
        self.number = {index: number for number, index in enumerate(self.compute)}  # among compute actions

    def reader_of_result(self, cell: _Cell) -> int:
        """Index of the forward on this rank that reads the result of a cell's forward, or -1. The result may be part of
        what the cell saves."""
        stage, microbatch = cell
        return self.forward.get((stage + 1, microbatch), -1)


class _Residency:
    """Walks through a rank's stream and tracks which activations are on the device. Amounts are in activations of one
    chunk; `shortage` is how many the rank needs at once if that is more than `limit`."""

    def __init__(self, walk: _Walk, limit: float) -> None:
        self.walk, self.limit = walk, limit
        self.recomputed_stages = {stage for stage, _ in walk.recompute}
        self.reload_from = {index: walk.compute[max(0, at - EARLIEST)] for at, index in enumerate(walk.compute)}
        self.offloadable: set[_Cell] = set()  # on the device since their F
        self.on_host: dict[_Cell, int] = {}  # with the index of the action that has taken over their memory
        self.resident = self.shortage = 0.0

    def round_trips(self) -> Iterator[_RoundTrip]:
        backward = self.walk.backward
        for index in self.walk.compute:
            due = [cell for cell in self.on_host if self.reload_from[backward[cell]] <= index]
            for cell in sorted(due, key=backward.__getitem__):
                if self.resident + 1 <= self.limit or backward[cell] == index:
                    self._make_room(index, self._before(index))
                    yield _RoundTrip(cell, self.on_host.pop(cell), index)
                    self.resident += 1  # and is not offloaded again
            for part in self.walk.stream[index].parts:
                self._run(part, index)

    def _before(self, index: int) -> int:
        """The compute action before this one: a reload waits for it, and so for all that it waits for."""
        return self.walk.compute[max(0, self.walk.number[index] - 1)]

    def _run(self, part: Instruction, index: int) -> None:
        cell = (part.stage, part.microbatch)
        is_recomputed = part.stage in self.recomputed_stages
        if part.op is Op.F and not is_recomputed:
            self._make_room(index, index)
            self.offloadable.add(cell)
            self.resident += 1
        elif part.op in (Op.B, Op.BW):
            if is_recomputed:
                self._make_room(index, index)
                self.resident += 1
            self.offloadable.discard(cell)
            self.resident += SAVED_CHANGE[part.op]
        elif part.op is Op.W:
            self.resident += SAVED_CHANGE[part.op]

    def _make_room(self, index: int, release: int) -> None:
        """Offloads until one more activation fits when action `release` begins, sparing what that action or action
        `index` uses."""
        used = {(part.stage, part.microbatch) for at in (index, release) for part in self.walk.stream[at].parts}
        used |= {cell for cell in self.offloadable if self.walk.reader_of_result(cell) >= release}
        while self.resident + 1 > self.limit + 1e-9:
            if not self.offloadable - used:
                self.shortage = max(self.shortage, self.resident + 1)
                return
            farthest = max(self.offloadable - used, key=self.walk.backward.__getitem__)
            self.offloadable.remove(farthest)
            self.on_host[farthest] = release
            self.resident -= 1
