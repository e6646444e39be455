"""What the mathematics of a step demands of the compute order, before any transfer is placed."""

from __future__ import annotations

from collections import deque

from pentad.schedules.costs import Costs
from pentad.schedules.instruction import Instruction, Key, Op, Unit
from pentad.schedules.program import Program


class ScheduleError(Exception):
    """A program that may not run. `rank` and `index` point at the culprit in its stream; -1 where there is none."""

    def __init__(self, text: str, rank: int = -1, index: int = -1) -> None:
        super().__init__(text)
        self.rank, self.index = rank, index


def inputs_of(part: Instruction, program: Program, backward: dict[tuple[int, int], Op]) -> tuple[Key, ...]:
    """Keys of the compute instructions whose results `part` reads, wherever they run.

    `backward` tells which op (B or BW) each (stage, microbatch) has.
    """
    stage, mb = part.stage, part.microbatch
    match part.op:
        case Op.F:
            received = (Key(Op.F, stage - 1, mb),) if stage > 0 else ()
            return (*received, Key(Op.F, stage, mb - 1)) if mb % program.slices else received  # keys and values
        case Op.B | Op.BW:
            own = Key(Op.F, stage, mb)
            read = [(stage, mb + 1)] if (mb + 1) % program.slices else []  # gradients of keys and values
            if stage + 1 < program.stages:
                read.append((stage + 1, mb))
            return own, *(Key(backward.get(at, Op.B), *at) for at in read)
        case Op.W:
            return (Key(Op.B, stage, mb),)
        case _:
            return ()


def backward_ops(program: Program) -> dict[tuple[int, int], Op]:
    """(stage, microbatch) -> B or BW."""
    return {
        (part.stage, part.microbatch): part.op
        for stream in program.streams
        for unit in stream
        for part in unit.parts
        if part.op in (Op.B, Op.BW)
    }


def compute_times(program: Program, costs: Costs) -> list[list[tuple[float, float]]]:
    """(start, end) of every unit of a compute-only program, each rank in its own order, transfers never queueing.

    Raises ScheduleError where a rank waits for something that never comes.
    """
    backward = backward_ops(program)
    ends: dict[Key, tuple[float, int]] = {}
    times: list[list[tuple[float, float]]] = [[] for _ in program.streams]
    waiting: dict[Key, list[int]] = {}
    ready = deque(range(program.ranks))

    def start_of(unit: Unit, rank: int) -> float | Key:
        start = times[rank][-1][1] if times[rank] else 0.0
        for part in unit.parts:
            for key in inputs_of(part, program, backward):
                if key not in ends:
                    return key
                end, where = ends[key]
                start = max(start, end + costs.hop(where, rank))
        return start

    while ready:
        rank = ready.popleft()
        while len(times[rank]) < len(program.streams[rank]):
            unit = program.streams[rank][len(times[rank])]
            start = start_of(unit, rank)
            if isinstance(start, Key):
                waiting.setdefault(start, []).append(rank)
                break
            end = start + sum(costs.on(rank, part) for part in unit.parts)
            times[rank].append((start, end))
            for part in unit.parts:
                ends[part.key] = (end, rank)
                ready.extend(waiting.pop(part.key, ()))
    for rank, done in enumerate(times):
        if len(done) < len(program.streams[rank]):
            unit = program.streams[rank][len(done)]
            missing = start_of(unit, rank)
            raise ScheduleError(f"rank {rank}: {unit} waits for {missing}, which never runs before it", rank, len(done))
    return times
