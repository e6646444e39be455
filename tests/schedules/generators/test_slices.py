"""Programs with sequence slices: data dependencies, order of gradients, memory, and their form on disk."""

from __future__ import annotations

from dataclasses import replace

import pytest
from reachability_proof import prove
from sliced_1f1b import backwards, sliced_1f1b

from pentad.schedules.compiler import lower
from pentad.schedules.ir.errors import ScheduleError
from pentad.schedules.ir.instruction import Instruction, Key, Op, instructions_of
from pentad.schedules.ir.program import Program
from pentad.schedules.simulate.costs import Costs
from pentad.schedules.simulate.dependencies import compute_times, inputs_of
from pentad.schedules.simulate.memory import activations_over_time, peak_activations
from pentad.schedules.simulate.simulate import simulate
from pentad.schedules.verify.check import check

SIZES = [(1, 1, 2), (1, 3, 1), (2, 2, 2), (2, 3, 4), (3, 2, 3), (4, 5, 2)]
of_all = pytest.mark.parametrize(("ranks", "microbatches", "slices"), SIZES)


def lowered(ranks: int, microbatches: int, slices: int, *, gated: bool = False, split: bool = False) -> Program:
    order = sliced_1f1b(ranks, microbatches, slices, split=split)
    return lower(order, Costs.uniform(order.stages), gated=gated, replicas=2)


@of_all
@pytest.mark.parametrize("gated", [False, True], ids=["posted", "gated"])
@pytest.mark.parametrize("split", [False, True], ids=["BW", "B and W"])
def test_a_sliced_program_is_proven(ranks: int, microbatches: int, slices: int, gated: bool, split: bool) -> None:
    program = lowered(ranks, microbatches, slices, gated=gated, split=split)
    check(program, replicas=2)
    prove(program, 2)
    assert program.total_slices == microbatches * slices
    assert len(simulate(program, Costs.uniform(ranks)).compute) == (2 + split) * ranks * program.total_slices


@of_all
def test_conversions_keep_the_slices(ranks: int, microbatches: int, slices: int) -> None:
    program = lowered(ranks, microbatches, slices)
    assert Program.from_bytes(program.to_bytes()) == program
    assert program.compute() == sliced_1f1b(ranks, microbatches, slices)
    meta = program.to_arrow().schema.metadata
    assert meta.get(b"slices") == (None if slices == 1 else str(slices).encode())
    other = replace(program, microbatches=program.total_slices, slices=1)
    assert (other.hash == program.hash) == (slices == 1)


def test_a_slice_reads_earlier_keys_and_values_and_later_gradients() -> None:
    program = sliced_1f1b(2, 2, 2)
    backward = {(stage, piece): Op.BW for stage in (0, 1) for piece in range(4)}

    def inputs(text_op: Op, stage: int, piece: int) -> set[str]:
        return {str(key) for key in inputs_of(Instruction(text_op, stage, piece), program, backward)}

    assert inputs(Op.F, 0, 2) == set()
    assert inputs(Op.F, 1, 3) == {"0F3", "1F2"}
    assert inputs(Op.BW, 1, 3) == {"1F3"}
    assert inputs(Op.BW, 0, 2) == {"0F2", "1BW2", "0BW3"}
    assert inputs(Op.W, 0, 2) == {"0B2"}


@pytest.mark.parametrize(("microbatches", "slices"), [(1, 3), (3, 2), (4, 4)])
def test_one_rank_saves_the_slices_of_one_microbatch(microbatches: int, slices: int) -> None:
    program = lowered(1, microbatches, slices)
    assert peak_activations(program) == pytest.approx([1.0])
    saved = activations_over_time(program, simulate(program, Costs.uniform(1)))
    assert max(share for _, share in saved[0]) == pytest.approx(1.0)


@of_all
def test_a_rank_waits_for_the_slices_that_it_needs(ranks: int, microbatches: int, slices: int) -> None:
    order = sliced_1f1b(ranks, microbatches, slices)
    ends = {
        part.key: end
        for stream, times in zip(order.streams, compute_times(order, Costs.uniform(ranks)), strict=True)
        for unit, (_, end) in zip(stream, times, strict=True)
        for part in unit.parts
    }
    for stage in range(ranks):
        for piece in range(order.total_slices):
            if piece % slices:
                assert ends[Key(Op.F, stage, piece)] > ends[Key(Op.F, stage, piece - 1)]
                assert ends[Key(Op.BW, stage, piece)] < ends[Key(Op.BW, stage, piece - 1)]
    assert [k.microbatch for k in sorted(ends, key=ends.__getitem__) if k.op is Op.BW and k.stage == 0] == backwards(
        microbatches, slices
    )


def with_order(program: Program, *keys: str) -> Program:
    """The program with only these instructions on rank 0, in this order."""
    known = {str(unit.key): unit for unit in program.streams[0]}
    return program.with_streams((tuple(known[key] for key in keys), *program.streams[1:]))


def test_a_slice_before_one_that_it_reads_is_refused() -> None:
    program = lowered(1, 1, 2)
    tail = [str(unit.key) for unit in program.streams[0][4:]]
    with pytest.raises(ScheduleError, match=r"0F1 reads 0F0, which does not come before it"):
        check(with_order(program, "0F1", "0F0", "0BW1", "0BW0", *tail), replicas=2)
    with pytest.raises(ScheduleError, match=r"0BW1 comes after 0BW0, but gradients .*slices of one from the last"):
        check(with_order(program, "0F0", "0F1", "0BW0", "0BW1", *tail), replicas=2)


def test_slices_of_one_sequence_must_be_on_one_rank() -> None:
    """Two ranks hold the only stage and run one slice each."""
    own = lowered(1, 1, 2).streams[0]
    streams = []
    for piece in (0, 1):
        mine = [part for part in instructions_of(own) if part.microbatch in (-1, piece)]
        last = Key(Op.BW, 0, piece)
        streams.append([p._replace(waits=tuple(last if k.op is Op.BW else k for k in p.waits)) for p in mine])
    program = Program("apart", tuple(map(tuple, streams)), ((0,), (0,)), 1, slices=2)
    with pytest.raises(ScheduleError, match=r"0BW0 reads 0BW1 of rank 1, but slices of one sequence stay together"):
        check(program, replicas=2)


@pytest.mark.parametrize("slices", [0, -1])
def test_less_than_one_slice_is_refused(slices: int) -> None:
    with pytest.raises(ScheduleError, match=f"slices is {slices}: expected at least 1"):
        check(replace(lowered(1, 2, 1), slices=slices), replicas=2)
