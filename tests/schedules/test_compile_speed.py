"""Compile time per instruction does not grow with the program's size, and ranks share streams.

`tests/bench/compile_speed.py` measures it; this file tests what holds on any machine.
"""

from __future__ import annotations

import time
import tracemalloc

import pytest

from pentad.schedules.compiler import compile_program
from pentad.schedules.spec.mesh import Mesh
from pentad.schedules.spec.schedule_spec import MemoryOptions


def seconds_per_instruction(name: str, ranks: int) -> float:
    """CPU seconds per instruction, the best of three."""
    times = []
    for _ in range(3):
        started = time.process_time()
        program = compile_program(name, ranks, 4 * ranks)
        times.append((time.process_time() - started) / program.columns.rows)
    return min(times)


@pytest.mark.quiet
@pytest.mark.parametrize("name", ["interleaved", "zb-v"])
def test_an_instruction_of_a_larger_program_compiles_as_fast(name: str) -> None:
    assert seconds_per_instruction(name, 32) < 1.5 * seconds_per_instruction(name, 8)


@pytest.mark.quiet
@pytest.mark.slow
def test_units_and_zero_make_an_instruction_at_most_two_and_a_half_times_as_slow() -> None:
    """As in 1f1b by stages. Gathers, frees and reductions count as instructions, too."""
    ranks, units = 32, (8,) * 32
    options = MemoryOptions(zero=3, units=units, max_gathered=2, reduce=None, sizes=((1,),) * sum(units))
    times = []
    for _ in range(3):
        started = time.process_time()
        program = compile_program("1f1b", ranks, 4 * ranks, replicas=2, memory_options=options)
        times.append((time.process_time() - started) / program.columns.rows)
    assert min(times) < 2.5 * seconds_per_instruction("1f1b", ranks)


def test_the_streams_of_16384_ranks_are_those_of_16() -> None:
    mesh = Mesh(dp=64, pp=16, cp=2, tp=8)
    tracemalloc.start()
    program = compile_program("interleaved", 16, 64, replicas=mesh.dp)
    streams = [program.streams[mesh.coordinates(rank).pp] for rank in range(mesh.size)]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (len(streams), len(set(map(id, streams)))) == (16_384, 16)
    assert peak < 2**27
