"""Seq1F1B (arXiv 2406.03488): order, memory and bubble; and what sequence slices change in any program."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from reachability_proof import prove
from saved_activations import activations_over_time

from pentad.schedules.catalogue import generate
from pentad.schedules.compiler import lower
from pentad.schedules.ir.errors import PentadError, ScheduleError
from pentad.schedules.ir.instruction import Instruction, Key, Op, instructions_of, parse_key
from pentad.schedules.ir.program import Program
from pentad.schedules.passes.optimizer_pass import add_step
from pentad.schedules.simulate.costs import Costs
from pentad.schedules.simulate.dependencies import compute_times, data_dependencies
from pentad.schedules.simulate.memory import peak_activations
from pentad.schedules.simulate.simulate import simulate
from pentad.schedules.spec.schedule_spec import ScheduleOptions
from pentad.schedules.verify.check import check, check_order

SIZES = (st.integers(1, 8), st.integers(1, 9), st.integers(1, 6))  # ranks, microbatches, slices
at_sizes = pytest.mark.parametrize(
    ("ranks", "microbatches", "slices"), [(1, 1, 2), (1, 3, 1), (2, 1, 4), (2, 2, 2), (2, 3, 4), (3, 2, 3), (4, 5, 2)]
)


def sliced(ranks: int, microbatches: int, slices: int, *, split: bool = False) -> Program:
    """The order of Seq1F1B; `split` splits each BW into B and W."""
    order = generate("seq-1f1b", ranks, microbatches, ScheduleOptions(slices=slices))
    if not split:
        return order
    ops = {Op.F: (Op.F,), Op.BW: (Op.B, Op.W)}
    streams = ([part._replace(op=op) for part in instructions_of(s) for op in ops[part.op]] for s in order.streams)
    return order.with_streams(tuple(map(tuple, streams)))


def lowered(ranks: int, microbatches: int, slices: int, *, gated: bool = False, split: bool = False) -> Program:
    order = sliced(ranks, microbatches, slices, split=split)
    return lower(order, Costs.uniform(order.stages), gated=gated, replicas=2)


def makespan(program: Program, f: float, bw: float) -> float:
    """Of a compute order, with costs f of F and bw of BW per microbatch and rank."""
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
        first = next(at for at, action in enumerate(stream) if action.key.op is Op.BW)
        assert first == min(p - rank - 1 + k, m * k)  # the warm-up, and the forward of the first pair


@given(*SIZES)
def test_peak_activations_are_one_microbatch_and_a_slice_per_following_rank(p: int, m: int, k: int) -> None:
    expected = [min(p - rank - 1 + k, m * k) / k for rank in range(p)]
    assert peak_activations(sliced(p, m, k)) == pytest.approx(expected)


@pytest.mark.parametrize(("microbatches", "slices"), [(1, 3), (3, 2), (4, 4)])
def test_one_rank_saves_the_slices_of_one_microbatch(microbatches: int, slices: int) -> None:
    program = lowered(1, microbatches, slices)
    assert peak_activations(program) == pytest.approx([1.0])
    saved = activations_over_time(program, simulate(program, Costs.uniform(1)))
    assert max(share for _, share in saved[0]) == pytest.approx(1.0)


@given(*SIZES, st.floats(0.1, 10), st.floats(0.1, 10))
def test_the_bubble_is_that_of_1f1b_divided_by_the_slices(p: int, m: int, k: int, f: float, bw: float) -> None:
    """(p - 1) (F + B + W) / slices."""
    work = m * (f + bw)
    bubble = makespan(sliced(p, m, k), f, bw) - work
    assert bubble == pytest.approx((p - 1) * (f + bw) / k, rel=1e-9)
    assert bubble == pytest.approx((makespan(generate("1f1b", p, m), f, bw) - work) / k, rel=1e-9)


@at_sizes
@pytest.mark.parametrize("gated", [False, True], ids=["posted", "gated"])
@pytest.mark.parametrize("split", [False, True], ids=["BW", "B and W"])
def test_a_sliced_program_is_proven(ranks: int, microbatches: int, slices: int, gated: bool, split: bool) -> None:
    program = lowered(ranks, microbatches, slices, gated=gated, split=split)
    check(program, replicas=2)
    prove(program, 2)
    assert (program.microbatches, program.slices, program.total_slices) == (microbatches, slices, microbatches * slices)
    assert len(simulate(program, Costs.uniform(ranks)).compute) == (2 + split) * ranks * program.total_slices


@at_sizes
def test_conversions_keep_the_slices(ranks: int, microbatches: int, slices: int) -> None:
    program = lowered(ranks, microbatches, slices)
    assert Program.from_bytes(program.to_bytes()) == program
    assert program.compute() == sliced(ranks, microbatches, slices)
    meta = program.to_arrow().schema.metadata
    assert meta.get(b"slices") == (None if slices == 1 else str(slices).encode())
    other = replace(program, microbatches=program.total_slices, slices=1)
    assert (other.hash == program.hash) == (slices == 1)


def inputs_by_instruction(program: Program) -> dict[str, set[str]]:
    inputs: dict[str, set[str]] = defaultdict(set)
    for reader, producer in zip(*data_dependencies(program), strict=True):
        inputs[str(program.columns.key(reader))].add(str(program.columns.key(producer)))
    return inputs


def test_a_slice_reads_earlier_keys_and_values_and_later_gradients() -> None:
    inputs = inputs_by_instruction(sliced(2, 2, 2))
    assert inputs["0F2"] == set()
    assert inputs["1F3"] == {"0F3", "1F2"}
    assert inputs["1BW3"] == {"1F3"}
    assert inputs["0BW2"] == {"0F2", "1BW2", "0BW3"}
    assert inputs_by_instruction(sliced(2, 2, 2, split=True))["0W2"] == {"0B2"}


@at_sizes
def test_a_rank_waits_for_the_slices_that_it_needs(ranks: int, microbatches: int, slices: int) -> None:
    order = sliced(ranks, microbatches, slices)
    ends = {
        part.key: end
        for stream, times in zip(order.streams, compute_times(order, Costs.uniform(ranks)), strict=True)
        for action, (_, end) in zip(stream, times, strict=True)
        for part in action.parts
    }
    for stage in range(ranks):
        for piece in range(order.total_slices):
            if piece % slices:
                assert ends[Key(Op.F, stage, piece)] > ends[Key(Op.F, stage, piece - 1)]
                assert ends[Key(Op.BW, stage, piece)] < ends[Key(Op.BW, stage, piece - 1)]


@pytest.mark.parametrize(
    ("one", "two", "message"),
    [
        ("0F0", "0F1", "0F1 reads 0F0, which does not come before it"),  # keys and values
        ("0BW3", "0BW2", "0BW3 comes after 0BW2, but gradients accumulate in microbatch order, the slices of one from"),
        ("0BW0", "0BW7", "gradients accumulate in microbatch order, the slices of one from the last to the first"),
    ],
)
def test_slices_out_of_order_are_refused(one: str, two: str, message: str) -> None:
    program = lowered(1, 2, 4)
    swap = {parse_key(one): Instruction(*parse_key(two)), parse_key(two): Instruction(*parse_key(one))}
    streams = tuple(tuple(swap.get(action.key, action) for action in stream) for stream in program.streams)
    with pytest.raises(ScheduleError, match=message):
        check(program.with_streams(streams), replicas=2)


def test_the_backward_of_a_slice_needs_that_of_the_next_slice() -> None:
    """With separate W, the order of W does not imply that of B."""
    keys = [(Op.F, 0), (Op.F, 1), (Op.B, 0), (Op.B, 1), (Op.W, 1), (Op.W, 0)]
    order = Program("by hand", (tuple(Instruction(op, 0, piece) for op, piece in keys),), ((0,),), 1, 1, 2)
    check_order(order)
    with pytest.raises(ScheduleError, match="0B0 reads 0B1, which does not come before it"):
        check(add_step(order))


def test_all_slices_of_a_microbatch_must_be_on_one_rank() -> None:
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


def test_invalid_numbers_of_slices_are_refused() -> None:
    with pytest.raises(PentadError, match=r"^slices is 0: expected at least 1 for schedule seq-1f1b$"):
        sliced(2, 2, 0)
    with pytest.raises(PentadError, match=r"^slices is 2: expected 1 for schedule 1f1b$"):
        generate("1f1b", 2, 2, ScheduleOptions(slices=2))
    with pytest.raises(PentadError, match="slices is 100 x 5000 x 1 x 4: expected at most 1000000"):
        sliced(100, 5000, 4)
    assert generate("1f1b", 2, 2, ScheduleOptions(slices=1)).slices == 1
    assert generate("seq-1f1b", 2, 2).slices == 4
