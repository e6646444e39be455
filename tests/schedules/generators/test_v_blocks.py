"""V-Half and V-Min respect their memory limits and idle no longer than the published method."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, count
from time import process_time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pentad.schedules.generators.v_blocks import v_half, v_min
from pentad.schedules.ir.instruction import Instruction, Op, instructions_of
from pentad.schedules.ir.program import Program
from pentad.schedules.passes.optimizer_pass import add_reduce, add_step
from pentad.schedules.passes.transfers import add_transfers
from pentad.schedules.simulate.costs import Costs
from pentad.schedules.simulate.dependencies import compute_times
from pentad.schedules.simulate.memory import peak_activations
from pentad.schedules.spec.schedule_spec import ScheduleSpec
from pentad.schedules.verify.check import check

GENERATORS = {"v-half": v_half, "v-min": v_min}
LIMITS = {"v-half": lambda p: (p + 2) // 2, "v-min": lambda p: (p + 4) // 3}  # microbatches of a whole rank
UNEQUAL = (1.0, 1.3, 0.7, 0.05)  # F, B, W of a rank, transfer
names = pytest.mark.parametrize("name", GENERATORS)


def program_of(name: str, p: int, m: int, costs: Costs | None = None) -> Program:
    streams = GENERATORS[name](ScheduleSpec(p, m, chunks=2, costs=costs))
    return Program(name, streams, tuple((r, 2 * p - 1 - r) for r in range(p)), m, 2)


def uniform(p: int, forward: float = 1.0, backward: float = 1.0, weight: float = 1.0, transfer: float = 0.0) -> Costs:
    return Costs.uniform(2 * p, forward, backward, weight, chunks=2, transfer=transfer)


def longest(program: Program, costs: Costs) -> float:
    return max(times[-1][1] - times[0][0] for times in compute_times(program, costs))


def idle(name: str, p: int, m: int) -> float:
    """Idle time of the busiest rank in units of a rank's F, at equal costs."""
    return longest(program_of(name, p, m), uniform(p)) - 3 * m


def saved_until_w(program: Program) -> float:
    """Peak activations of any rank, in microbatches of a whole rank, if B frees nothing."""
    share = {Op.F: 0.5, Op.B: 0.0, Op.W: -0.5}
    return max(max(accumulate(share[part.op] for part in instructions_of(stream))) for stream in program.streams)


@st.composite
def costs_of(draw: st.DrawFn, p: int) -> Costs:
    """Every stage has its own costs."""
    each = st.lists(st.floats(0.2, 3.0), min_size=2 * p, max_size=2 * p).map(tuple)
    return Costs(draw(each), draw(each), draw(each), draw(st.sampled_from([0.0, 0.1, 2.0])))


@pytest.mark.sampled(1)
@names
@given(p=st.integers(1, 9), m=st.integers(1, 20), data=st.data())
def test_every_order_is_complete_and_runs_at_any_costs(name: str, p: int, m: int, data: st.DataObject) -> None:
    costs = data.draw(st.none() | costs_of(p))
    program = program_of(name, p, m, costs)
    compute_times(program, costs or uniform(p))  # raises if a rank waits forever
    for rank, stream in enumerate(program.streams):
        assert len(stream) == 6 * m
        for stage in program.placement[rank]:
            for op in (Op.F, Op.B, Op.W):
                mine = [part.microbatch for part in instructions_of(stream) if (part.op, part.stage) == (op, stage)]
                assert mine == list(range(m))
    assert max(peak_activations(program)) <= saved_until_w(program) <= min(LIMITS[name](p), m)


@pytest.mark.parametrize("p", [4, 8, 16])
@pytest.mark.parametrize("more", [0, 3, 8])
def test_idle_times_at_equal_costs_match_the_paper(p: int, more: int) -> None:
    m = 2 * p + more
    assert idle("v-half", p, m) == (3 * p - 7) / 2
    assert idle("v-min", p, m) <= (4 * p - 5) / 2


@pytest.mark.sampled(5)
@pytest.mark.parametrize("p", [*range(2, 13), 17, 18])
def test_idle_times_at_equal_costs_are_bounded_for_any_number_of_ranks(p: int) -> None:
    for m in (p, 2 * p + 1):
        assert idle("v-half", p, m) <= max((3 * p - 7 + 3 * (p % 2)) / 2, 0.5)
        assert idle("v-min", p, m) <= (4 * p - 5) / 2


@names
@given(p=st.integers(1, 12), m=st.integers(1, 12))
def test_no_step_at_equal_costs_is_longer_than_that_of_1f1b(name: str, p: int, m: int) -> None:
    assert idle(name, p, m) <= 3 * p - 3


@pytest.mark.parametrize(("p", "m"), [(48, 18), pytest.param(65, 24, marks=pytest.mark.slow)])
def test_the_memory_formula_holds_for_many_ranks(p: int, m: int) -> None:
    assert saved_until_w(program_of("v-min", p, m)) == LIMITS["v-min"](p)


def test_the_published_example() -> None:
    for name, step, saved in (("v-half", 26.5, 3), ("v-min", 29.5, 2)):
        program = program_of(name, 4, 8)
        assert longest(program, uniform(4)) == step
        assert (max(peak_activations(program)), saved_until_w(program)) == (saved, saved)


@pytest.mark.parametrize(("name", "rate", "published"), [("v-half", 0.1382, 0.145), ("v-min", 0.2295, 0.353)])
def test_at_unequal_costs_the_bubble_is_below_the_published_one(name: str, rate: float, published: float) -> None:
    costs = uniform(8, *UNEQUAL)
    found = 1 - 32 * sum(UNEQUAL[:3]) / longest(program_of(name, 8, 32, costs), costs)
    assert round(found, 4) <= rate < published


def squeezed(name: str, p: int, m: int) -> Program:
    """The paper's building block, from its offsets, with every W in the first free slot."""
    streams = []
    for r in range(p):
        if name == "v-half":
            i = 0 if p % 2 else 3
            offsets = [2 * r, 3 * p - r - 2, 3 * p + i + 2 * r - 1, 6 * p + i - r - 2]
        else:
            i = 0 if p % 3 else 2
            offsets = [r, 2 * p - r - 1, 2 * p + i + r, 4 * p + i - r - 1]
        parts = [(Op.F, r), (Op.F, 2 * p - 1 - r), (Op.B, 2 * p - 1 - r), (Op.B, r)]
        slots = {offsets[k] + 6 * mb: Instruction(*parts[k], mb) for mb in range(m) for k in range(4)}
        assert len(slots) == 4 * m
        for slot, part in sorted(slots.items()):
            if part.op is Op.B:
                slots[next(s for s in count(slot) if s not in slots)] = Instruction(Op.W, part.stage, part.microbatch)
        streams.append(tuple(part for _, part in sorted(slots.items())))
    return Program(name, tuple(streams), tuple((r, 2 * p - 1 - r) for r in range(p)), m, 2)


@names
@given(p=st.integers(1, 10), m=st.integers(1, 20), data=st.data())
def test_no_step_is_longer_than_the_paper_s_squeezed_blocks(name: str, p: int, m: int, data: st.DataObject) -> None:
    costs = data.draw(costs_of(p))
    block = squeezed(name, p, m)
    assert saved_until_w(block) <= LIMITS[name](p)
    assert longest(program_of(name, p, m, costs), costs) <= longest(block, costs) * (1 + 1e-9)


@names
@pytest.mark.parametrize(("p", "m"), [(1, 2), (2, 5), (5, 3), (6, 13)])
@pytest.mark.parametrize("gated", [False, True])
def test_orders_with_their_transfers_are_proven(name: str, p: int, m: int, gated: bool) -> None:
    costs = uniform(p, *UNEQUAL)
    check(add_step(add_reduce(add_transfers(program_of(name, p, m, costs), costs, gated=gated), replicas=1)))


@names
def test_generation_is_deterministic(name: str) -> None:
    assert program_of(name, 5, 9, uniform(5, *UNEQUAL)).hash == program_of(name, 5, 9, uniform(5, *UNEQUAL)).hash


@pytest.mark.quiet
@names
def test_16_ranks_and_64_microbatches_take_less_than_a_second(name: str) -> None:
    begin = process_time()
    program_of(name, 16, 64)
    assert process_time() - begin < 1.0


@pytest.mark.parametrize("name", ["v-half", "v-min"])
def test_slow_ranks_and_links_are_planned_for(name: str) -> None:
    """The step is shorter than with the order planned for equal ranks."""
    equal = uniform(4, 1.0, 1.2, 0.8, 0.05)
    links = tuple(tuple(0.05 * (1 + 8 * (source == 1)) for _ in range(4)) for source in range(4))
    costs = replace(equal, slowdown=(1.0, 1.5, 1.0, 1.0), links=links)
    assert longest(program_of(name, 4, 12, costs), costs) < longest(program_of(name, 4, 12, equal), costs)
