"""Pass: puts a SEND after every result another rank needs, and a RECV where that sender is due."""

from __future__ import annotations

import bisect
from collections import defaultdict
from typing import NamedTuple

from pentad.schedules.costs import Costs
from pentad.schedules.instruction import SENDS, Instruction, Key, Op, Overlap, Unit
from pentad.schedules.order import backward_ops, compute_times, inputs_of
from pentad.schedules.program import Program, Stream, index_of


class Transfer(NamedTuple):
    """One tensor from a rank to another: `sent` is when the sender is due to have it."""

    sent: float
    source: int
    target: int
    made: Key
    used: Key
    send: Key
    receive: Key


def add_transfers(program: Program, costs: Costs, *, gated: bool, validated: bool = False) -> Program:
    """A program whose ranks exchange what they compute.

    A RECV stands before the compute unit during which its sender is due, so that its slot is granted before the data
    comes. With `gated` (transports whose receive occupies the GPU while it waits, such as NCCL) it stands after that
    unit and waits for it: it is launched when the data is there. With `validated` both ends of a transfer stand before
    the first backward of their ranks, or behind it (see validation.py). Raises ScheduleError when the order cannot run.
    """
    times = compute_times(program, costs)
    wanted = _transfers(program, times)
    sends: dict[int, dict[Key, list[Instruction]]] = defaultdict(lambda: defaultdict(list))
    receives: dict[int, list[tuple[int, bool, Transfer]]] = defaultdict(list)
    opening = [_first_backward(stream) for stream in program.streams]
    position = program.positions
    for transfer in sorted(wanted):
        send = Instruction(*transfer.send, peer=transfer.target, waits=(transfer.made,))
        sends[transfer.source][transfer.made].append(send)
        place = _due(times[transfer.target], transfer.sent, after=gated)
        early = position[transfer.source][transfer.made] < opening[transfer.source]
        if validated:
            place = (min if early else max)(place, opening[transfer.target])
        receives[transfer.target].append((place, not early, transfer))
    streams = []
    for rank, stream in enumerate(program.streams):
        posted = _receives(stream, receives[rank], gated=gated)
        streams.append(_woven(stream, sends[rank], posted))
    return program.with_streams(tuple(streams))


def _transfers(program: Program, times: list[list[tuple[float, float]]]) -> list[Transfer]:
    backward = backward_ops(program)
    where = {
        part.key: (rank, times[rank][index][1])
        for rank, stream in enumerate(program.streams)
        for index, unit in enumerate(stream)
        for part in unit.parts
    }
    found = []
    for used, (target, _) in where.items():
        for made in inputs_of(Instruction(*used), program, backward):
            source, end = where[made]
            if source != target:
                send = Op.SEND_F if made.op is Op.F else Op.SEND_B
                keys = Key(send, made.stage, made.microbatch), Key(SENDS[send], used.stage, used.microbatch)
                found.append(Transfer(end, source, target, made, used, *keys))
    return found


def _first_backward(stream: Stream) -> int:
    return next(index for index, unit in enumerate(stream) if any(part.op is not Op.F for part in unit.parts))


def _due(times: list[tuple[float, float]], sent: float, *, after: bool) -> int:
    """Position in the target's stream of the unit during which (after: behind which) the sender is due."""
    place = bisect.bisect_right(times, sent, key=lambda span: span[1])
    running = place < len(times) and times[place][0] < sent
    return place + 1 if after and running else place


def _receives(
    stream: Stream, wanted: list[tuple[int, bool, Transfer]], *, gated: bool
) -> dict[int, list[tuple[Instruction, Key]]]:
    """Position -> receives to put before it, each with a slot that its last reader has left by then."""
    reader_of = _last_readers(stream)
    slots: dict[Op, list[tuple[int, Key]]] = defaultdict(list)  # op -> a slot's (index of last reader, its key)
    posted: dict[int, list[tuple[Instruction, Key]]] = defaultdict(list)
    for place, _, transfer in sorted(wanted):
        key = transfer.receive
        pool = slots[key.op]
        free = [slot for slot, (left, _) in enumerate(pool) if left < place]
        waits: tuple[Key, ...] = (pool[free[0]][1],) if free else ()
        if gated and place > 0:
            waits = tuple(dict.fromkeys((*waits, stream[place - 1].parts[-1].key)))
        reader = reader_of[key]
        if free:
            slot, pool[free[0]] = free[0], reader
        else:
            slot = len(pool)
            pool.append(reader)
        posted[place].append((Instruction(*key, peer=transfer.source, slot=slot, waits=waits), transfer.used))
    return posted


def _last_readers(stream: Stream) -> dict[Key, tuple[int, Key]]:
    """Receive -> the last unit that reads its slot: an activation is read until B, a gradient until W."""
    position = index_of(stream)
    found = {}
    for key, index in position.items():
        if key.op in (Op.B, Op.BW):
            found[Key(Op.RECV_F, key.stage, key.microbatch)] = (index, key)
        if key.op in (Op.W, Op.BW):
            found[Key(Op.RECV_B, key.stage, key.microbatch)] = (index, key)
    return found


def _woven(
    stream: Stream, sends: dict[Key, list[Instruction]], posted: dict[int, list[tuple[Instruction, Key]]]
) -> Stream:
    arrives = {used: receive.key for group in posted.values() for receive, used in group}
    woven: list[Unit] = []
    for index, unit in enumerate(stream):
        woven += [receive for receive, _ in posted.get(index, ())]
        parts = [p._replace(waits=(arrives[p.key],)) if p.key in arrives else p for p in unit.parts]
        woven.append(Overlap(*parts) if len(parts) == 2 else parts[0])
        for part in unit.parts:
            woven += sends.get(part.key, ())
    return tuple(woven)
