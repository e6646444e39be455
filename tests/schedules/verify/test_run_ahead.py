"""No program needs its host to run ahead of the GPU."""

from __future__ import annotations

from collections import Counter, defaultdict

import pytest

from pentad.schedules.compiler import compile_program
from pentad.schedules.ir.instruction import RECEIVES, SENDS, Instruction, instructions_of
from pentad.schedules.ir.program import Program

CASES = [("gpipe", 3), ("1f1b", 5), ("zb-h1", 8), ("zb-h2", 8), ("zb-v", 8), ("dualpipe", 8)]


def ends(program: Program) -> dict[tuple, tuple]:
    """(rank, key) of a transfer -> (kind, source, target, index in its channel)."""
    found, counts = {}, Counter[tuple]()
    for rank, stream in enumerate(program.streams):
        for part in instructions_of(stream):
            if part.op in SENDS or part.op in RECEIVES:
                sends = part.op in SENDS
                name = (part.op, rank, part.peer) if sends else (RECEIVES[part.op], part.peer, rank)
                found[rank, part.key] = (*name, counts[sends, name])
                counts[sends, name] += 1
    return found


def left_over(program: Program, ahead: int) -> int:
    """How many instructions never end if hosts launch an action only while at most `ahead` compute instructions are
    open.

    Lanes run in order. A receive grants its slot when it starts and ends when the data has arrived; a send waits for
    the grant.
    """
    transfer, ranks = ends(program), range(program.ranks)
    host = [0 for _ in ranks]
    lanes: list[dict[str, list[Instruction]]] = [defaultdict(list) for _ in ranks]
    done: list[set] = [set() for _ in ranks]
    open_compute = [0 for _ in ranks]
    granted, arrived, moved = set(), set(), True
    while moved:
        moved = False
        for rank in ranks:
            while host[rank] < len(program.streams[rank]) and open_compute[rank] <= ahead:
                for part in program.streams[rank][host[rank]].parts:
                    lanes[rank][part.lane].append(part)
                    open_compute[rank] += part.lane == "compute"
                host[rank] += 1
                moved = True
            for queue in lanes[rank].values():
                while queue and done[rank].issuperset(queue[0].waits):
                    part, place = queue[0], transfer.get((rank, queue[0].key))
                    if part.op in RECEIVES:
                        moved |= place not in granted
                        granted.add(place)
                    if (part.op in RECEIVES and place not in arrived) or (part.op in SENDS and place not in granted):
                        break
                    if part.op in SENDS:
                        arrived.add(place)
                    queue.pop(0)
                    done[rank].add(part.key)
                    open_compute[rank] -= part.lane == "compute"
                    moved = True
    total = sum(1 for stream in program.streams for _ in instructions_of(stream))
    return total - sum(map(len, done))


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(("name", "microbatches"), CASES)
def test_a_host_that_does_not_run_ahead_stops_no_program(name, microbatches, ranks, gated):
    program = compile_program(name, ranks, microbatches, gated=gated)
    assert [left_over(program, ahead) for ahead in (0, 1, 2, 10**6)] == [0, 0, 0, 0]


def test_a_program_that_sends_too_late_is_stopped():
    program = compile_program("1f1b", 2, 2)
    first = list(program.streams[0])
    sends = [action for action in first if action.parts[0].op in SENDS]
    late = [action for action in first if action not in sends] + sends
    broken = Program(program.name, (tuple(late), program.streams[1]), program.placement, program.microbatches)
    assert left_over(broken, 0) > 0
