"""Evaluations run every forward once, on the rank that runs it in training, and are proven like any other program."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_sizes import NAMES, programs

from pentad.schedules.compiler import compile_forward_only, compile_program, lower
from pentad.schedules.generators.forward_only import forward_only
from pentad.schedules.ir.errors import ScheduleError
from pentad.schedules.ir.instruction import RECEIVES, Instruction, Key, Op, instructions_of
from pentad.schedules.ir.program import Program
from pentad.schedules.simulate.costs import Costs
from pentad.schedules.simulate.memory import peak_activations
from pentad.schedules.simulate.simulate import simulate, simulate_step_time
from pentad.schedules.spec.schedule_spec import MemoryOptions
from pentad.schedules.verify.check import check

LOSS = Key(Op.LOSS, -1, -1)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=6)
@given(data=st.data(), zero=st.sampled_from([0, 1, 3]), gated=st.booleans())
def test_every_schedule_has_a_proven_evaluation(name: str, data: st.DataObject, zero: int, gated: bool) -> None:
    """It takes no longer than the forwards of the busiest rank plus one pass through the stages."""
    trained = data.draw(programs(name, 6, 12))
    program = compile_forward_only(trained, gated=gated, memory_options=MemoryOptions(zero=zero))
    assert program.compute_rank == trained.compute_rank and program.placement == trained.placement
    forwards = [sum(part.op is Op.F for part in instructions_of(stream)) for stream in program.streams]
    assert sum(forwards) == len(trained.compute_rank)
    makespan = simulate_step_time(program, Costs.uniform(program.stages)).makespan
    assert makespan <= max(forwards) + program.stages - 1
    assert all(stream[-1].key == LOSS for stream in program.streams)
    assert peak_activations(program) == [0.0] * program.ranks


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb-v", "dualpipe"])
def test_received_activations_need_two_slots_at_most(name: str) -> None:
    program = compile_forward_only(compile_program(name, 4, 8), memory_options=MemoryOptions())
    assert max(part.slot for stream in program.streams for part in instructions_of(stream) if part.op in RECEIVES) < 2


def test_a_forward_only_program_survives_arrow_and_differs_from_the_same_streams_of_training() -> None:
    program = compile_forward_only(compile_program("zb-h2", 4, 8), memory_options=MemoryOptions())
    assert Program.from_bytes(program.to_bytes()) == program
    assert replace(program, forward_only=False).hash != program.hash
    assert {span.op for span in simulate(program, Costs.uniform(4)).spans} == {"F", "SEND_F", "RECV_F", "LOSS"}


def changed(program: Program, rank: int, index: int, *instructions: Instruction) -> Program:
    """The program with a rank's action at `index` (negative: from the end) replaced by these."""
    streams = [list(stream) for stream in program.streams]
    streams[rank][index : index + 1 or None] = instructions
    return program.with_streams(tuple(map(tuple, streams)))


def test_broken_evaluations_are_refused() -> None:
    trained = compile_program("1f1b", 2, 2)
    program = compile_forward_only(trained, memory_options=MemoryOptions())
    loss = program.streams[1][-1].parts[0]
    backward = Instruction(Op.BW, 1, 0)
    last = next(i for i, action in enumerate(program.streams[1]) if action.key == Key(Op.F, 1, 1))
    broken = {
        "rank 1 has no LOSS": changed(program, 1, -1),
        "LOSS does not wait for 1F1": changed(program, 1, -1, loss._replace(waits=(Key(Op.F, 1, 0),))),
        "found 1F0, 1BW0: expected 1F0 alone": changed(program, 1, -1, backward, loss),
        "STEP cannot run in a forward-only program": changed(program, 1, -1, loss, Instruction(Op.STEP)),
        "found nothing: expected 1F1 alone": changed(program, 1, last),
        "LOSS ends forward-only programs": changed(trained, 1, -1, trained.streams[1][-1].parts[0], loss),
        "found 0F0: expected 0F0 with 0BW0": replace(program, forward_only=False),
        "found 0F0, 0BW0: expected 0F0 alone": replace(trained, forward_only=True),
    }
    for text, each in broken.items():
        with pytest.raises(ScheduleError, match=text):
            check(each)


def test_training_needs_backwards() -> None:
    order = replace(forward_only(compile_program("gpipe", 2, 2)), forward_only=False)
    with pytest.raises(ScheduleError, match="expected 0F0 with 0BW0"):
        lower(order, Costs.uniform(2))
