"""Stages split into units: the same work in the same order, and every law of programs holds."""

from __future__ import annotations

from collections import Counter

import pytest

from pentad.schedules.catalogue import CATALOGUE, generate
from pentad.schedules.compiler import compile_program
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.ir.instruction import Op, instructions_of
from pentad.schedules.ir.program import Program
from pentad.schedules.passes.units import split_into_units
from pentad.schedules.simulate.costs import Costs
from pentad.schedules.simulate.simulate import simulate_step_time
from pentad.schedules.spec.schedule_spec import MemoryOptions

pytestmark = pytest.mark.timeout(60)
NAMES = [name for name in CATALOGUE if name != "zb-auto"]


def by_stage(program: Program) -> list[list[tuple[Op, int, int]]]:
    """(op, stage, microbatch) of each instruction of an order, by rank."""
    found = []
    for stream in program.streams:
        merged: list[tuple[Op, int, int]] = []
        for op, unit, microbatch in (part.key for part in instructions_of(stream)):
            merged.append((op, program.stage_of[unit], microbatch))
        found.append(merged)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_every_unit_does_the_work_of_its_stage(name: str) -> None:
    order = generate(name, 4, 8)
    counts = tuple(1 + stage % 3 for stage in range(order.stages))
    split = split_into_units(order, counts)
    for whole, parts in zip(by_stage(order), by_stage(split), strict=True):
        expected = Counter({key: counts[key[1]] for key in whole})
        assert Counter(parts) == expected


@pytest.mark.parametrize("name", NAMES)
def test_programs_of_units_are_proven_and_take_as_long(name: str) -> None:
    """With equal costs of units and free communication: splitting stages delays nothing."""
    split = compile_program(name, 2, 4, memory_options=MemoryOptions(units=(2,) * generate(name, 2, 4).stages))
    whole = compile_program(name, 2, 4)
    costs = Costs.uniform(split.stages, chunks=split.chunks, slices=split.slices)
    makespan = simulate_step_time(split, costs)[0]
    assert makespan <= simulate_step_time(whole, costs.of_stages(split.units))[0] + 1e-9
    stages = tuple(tuple(dict.fromkeys(split.stage_of[unit] for unit in held)) for held in split.placement)
    assert stages == whole.placement


def test_forwards_go_up_and_backwards_down_the_units() -> None:
    split = split_into_units(generate("zb-h1", 1, 1), (3,))
    assert " ".join(map(str, split.streams[0])) == "0F0 1F0 2F0 2B0 1B0 0B0 2W0 1W0 0W0"


def test_pairs_of_unequal_stages_overlap_as_far_as_both_go() -> None:
    split = split_into_units(generate("dualpipe", 2, 4), (2, 3))
    pairs = [str(action) for action in split.streams[0] if len(action.parts) == 2]
    assert pairs[:2] == ["(2F3+1BW0)", "(3F3+0BW0)"]


def test_a_program_of_units_is_stored_whole() -> None:
    program = compile_program("1f1b", 2, 2, memory_options=MemoryOptions(units=(2, 3)))
    loaded = Program.from_bytes(program.to_bytes())
    assert loaded == program and loaded.units == (2, 3) and loaded.hash == program.hash
    assert program.hash != compile_program("1f1b", 2, 2).hash


@pytest.mark.parametrize("units", [(2,), (1, 0), (1, 2, 3)])
def test_there_is_a_count_for_every_stage(units: tuple[int, ...]) -> None:
    with pytest.raises(PentadError, match=r"^units are .*: expected one count of at least 1 for each of 2 stages$"):
        compile_program("1f1b", 2, 2, memory_options=MemoryOptions(units=units))
