"""Seq1F1B (arXiv 2406.03488): its order, memory and bubble; with one slice it is 1F1B."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pentad.schedules.catalogue import generate
from pentad.schedules.compiler import compile_program
from pentad.schedules.ir.errors import PentadError, ScheduleError
from pentad.schedules.ir.instruction import Instruction, Key, Op, instructions_of, parse_key
from pentad.schedules.ir.program import Program
from pentad.schedules.passes.optimizer_pass import add_step
from pentad.schedules.simulate.costs import Costs
from pentad.schedules.simulate.dependencies import compute_times
from pentad.schedules.simulate.memory import peak_activations
from pentad.schedules.spec.schedule_spec import ScheduleOptions
from pentad.schedules.verify.check import check, check_order

SIZES = (st.integers(1, 8), st.integers(1, 9), st.integers(1, 6))  # ranks, microbatches, slices


def sliced(ranks: int, microbatches: int, slices: int) -> Program:
    return generate("seq-1f1b", ranks, microbatches, ScheduleOptions(slices=slices))


def swapped(program: Program, one: Key, two: Key) -> Program:
    """A compute order with two instructions swapped."""
    swap = {one: Instruction(*two), two: Instruction(*one)}
    streams = tuple(tuple(swap.get(unit.key, unit) for unit in stream) for stream in program.streams)
    return program.with_streams(streams)


def makespan(program: Program, f: float, bw: float) -> float:
    """With a forward of f and a backward of bw per microbatch and rank."""
    costs = Costs.uniform(program.stages, f, bw / 2, bw / 2, slices=program.slices)
    return max(spans[-1][1] for spans in compute_times(program, costs))


@given(*SIZES[:2])
def test_with_one_slice_it_is_1f1b(p: int, m: int) -> None:
    assert sliced(p, m, 1).streams == generate("1f1b", p, m).streams


@given(*SIZES)
def test_slices_go_forward_in_order_and_backward_in_reverse_within_a_microbatch(p: int, m: int, k: int) -> None:
    program = sliced(p, m, k)
    check_order(program)
    for rank, stream in enumerate(program.streams):
        forward = [part.microbatch for part in instructions_of(stream) if part.op is Op.F]
        backward = [part.microbatch for part in instructions_of(stream) if part.op is Op.BW]
        assert forward == list(range(m * k))
        assert backward == [mb * k + piece for mb in range(m) for piece in range(k - 1, -1, -1)]
        first = next(at for at, unit in enumerate(stream) if unit.key.op is Op.BW)
        assert first == min(p - rank - 1 + k, m * k)  # the warm-up, and the forward of the first pair


@given(*SIZES)
def test_peak_activations_are_one_microbatch_and_a_slice_per_following_rank(p: int, m: int, k: int) -> None:
    expected = [min(p - rank - 1 + k, m * k) / k for rank in range(p)]
    assert peak_activations(sliced(p, m, k)) == pytest.approx(expected)


@given(*SIZES, st.floats(0.1, 10), st.floats(0.1, 10))
def test_the_bubble_is_that_of_1f1b_divided_by_the_slices(p: int, m: int, k: int, f: float, bw: float) -> None:
    """(p - 1) (F + B + W) / slices."""
    work = m * (f + bw)
    bubble = makespan(sliced(p, m, k), f, bw) - work
    assert bubble == pytest.approx((p - 1) * (f + bw) / k, rel=1e-9)
    assert bubble == pytest.approx((makespan(generate("1f1b", p, m), f, bw) - work) / k, rel=1e-9)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("p", "m", "k"), [(1, 1, 2), (2, 1, 4), (2, 3, 2), (3, 2, 3), (4, 5, 4)])
def test_it_compiles_and_survives_serialization(p: int, m: int, k: int, gated: bool) -> None:
    program = compile_program("seq-1f1b", p, m, gated=gated, replicas=2, options=ScheduleOptions(slices=k))
    assert (program.microbatches, program.slices, program.total_slices) == (m, k, m * k)
    read = Program.from_bytes(program.to_bytes())
    assert read == program
    check(read, replicas=2)


def test_slices_are_part_of_the_hash() -> None:
    program = generate("1f1b", 2, 4)
    halved = Program(program.name, program.streams, program.placement, 2, 1, 2)
    assert halved.total_slices == program.total_slices
    assert halved.hash != program.hash


@pytest.mark.parametrize(
    ("one", "two", "message"),
    [
        ("0F0", "0F1", "0F1 reads 0F0, which does not come before it"),  # keys and values
        ("0BW3", "0BW2", "gradients accumulate in microbatch order, the slices of one from the last to the first"),
        ("0BW0", "0BW7", "gradients accumulate in microbatch order, the slices of one from the last to the first"),
    ],
)
def test_slices_out_of_order_are_refused(one: str, two: str, message: str) -> None:
    program = compile_program("seq-1f1b", 1, 2, options=ScheduleOptions(slices=4))
    with pytest.raises(ScheduleError, match=message):
        check(swapped(program, parse_key(one), parse_key(two)))


def test_the_backward_of_a_slice_needs_that_of_the_next_slice() -> None:
    """With separate W, the order of W does not imply that of B."""
    streams = (tuple(Instruction(op, 0, piece) for op, piece in [(Op.F, 0), (Op.F, 1), (Op.B, 0), (Op.B, 1)]),)
    late = tuple(Instruction(Op.W, 0, piece) for piece in (1, 0))
    order = Program("by hand", (streams[0] + late,), ((0,),), 1, 1, 2)
    check_order(order)
    with pytest.raises(ScheduleError, match="0B0 reads 0B1, which does not come before it"):
        check(add_step(order))


def test_all_slices_of_a_microbatch_must_be_on_one_rank() -> None:
    streams = tuple((Instruction(Op.F, 0, piece), Instruction(Op.BW, 0, piece)) for piece in range(2))
    with pytest.raises(ScheduleError, match="slices"):
        check(add_step(Program("by hand", streams, ((0,), (0,)), 1, 1, 2)))


def test_invalid_numbers_of_slices_are_refused() -> None:
    with pytest.raises(PentadError, match=r"^slices is 0: expected at least 1 for schedule seq-1f1b$"):
        sliced(2, 2, 0)
    with pytest.raises(PentadError, match=r"^slices is 2: expected 1 for schedule 1f1b$"):
        generate("1f1b", 2, 2, ScheduleOptions(slices=2))
    with pytest.raises(PentadError, match="slices is 100 x 5000 x 1 x 4: expected at most 1000000"):
        sliced(100, 5000, 4)
    assert generate("1f1b", 2, 2, ScheduleOptions(slices=1)).slices == 1
    assert generate("seq-1f1b", 2, 2).slices == 4
