"""The automatic zero-bubble scheduler: published rates, known optima, its memory limit, its speed."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pentad.schedules.catalogue import generate
from pentad.schedules.generators.zb_auto import zb_1p, zb_2p, zb_auto
from pentad.schedules.generators.zb_h import zb_h1, zb_h2
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.ir.instruction import Action, Op, instructions_of
from pentad.schedules.ir.program import Program
from pentad.schedules.passes.optimizer_pass import add_reduce, add_step
from pentad.schedules.passes.transfers import add_transfers
from pentad.schedules.simulate.costs import Costs
from pentad.schedules.simulate.dependencies import compute_times
from pentad.schedules.simulate.memory import peak_activations
from pentad.schedules.spec.schedule_spec import ScheduleOptions, ScheduleSpec
from pentad.schedules.verify.check import check

Streams = Sequence[tuple[Action, ...]]

# arXiv 2401.10241, tables 9 and 5: ranks, microbatches, milliseconds of F, B, W and a hop; bubble rates of 1p and 2p
PUBLISHED = [
    (8, 24, 18.522, 18.086, 9.337, 0.601, 0.1585, 0.0433),
    (8, 32, 18.513, 18.086, 9.331, 0.626, 0.1242, 0.0039),
    (8, 64, 18.546, 18.097, 9.321, 0.762, 0.0674, 0.0026),
    (8, 24, 29.718, 29.444, 19.927, 0.527, 0.1323, 0.0029),
    (8, 32, 29.802, 29.428, 19.530, 0.577, 0.1045, 0.0022),
    (8, 64, 29.935, 29.621, 19.388, 0.535, 0.0554, 0.0010),
    (16, 48, 11.347, 11.248, 8.132, 0.377, 0.1397, 0.0066),
    (16, 64, 11.307, 11.254, 8.101, 0.379, 0.1088, 0.0054),
    (16, 128, 11.325, 11.308, 8.109, 0.378, 0.0576, 0.0028),
    (32, 96, 10.419, 10.207, 7.715, 0.408, 0.1421, 0.0038),
    (32, 128, 10.408, 10.204, 7.703, 0.408, 0.1106, 0.0029),
    (32, 256, 10.402, 10.248, 7.698, 0.460, 0.0594, 0.0018),
]
LIMITS = st.one_of(st.integers(1, 12), st.floats(1, 12))


@st.composite
def specs(draw: st.DrawFn) -> ScheduleSpec:
    """Every stage has its own costs, at any scale."""
    ranks, scale = draw(st.integers(1, 6)), draw(st.sampled_from([1e-6, 1.0, 1e3]))
    each = st.tuples(*[st.floats(0.01, 10).map(lambda cost: cost * scale)] * ranks)
    transfer, launch = (scale * draw(st.floats(0, 3)) for _ in range(2))
    costs = Costs(draw(each), draw(each), draw(each), transfer=transfer, launch=launch)
    return ScheduleSpec(ranks, draw(st.integers(1, 12)), costs=costs, memory_limit=draw(LIMITS))


def program(streams: Streams, microbatches: int) -> Program:
    return Program("zb", streams, tuple((rank,) for rank in range(len(streams))), microbatches)


def spans(streams: Streams, microbatches: int, costs: Costs) -> tuple[float, float]:
    """The longest and the makespan of an order."""
    times = compute_times(program(streams, microbatches), costs)
    return max(rank[-1][1] - rank[0][0] for rank in times), max(rank[-1][1] for rank in times)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("ranks", "microbatches", "f", "b", "w", "transfer", "rate_1p", "rate_2p"), PUBLISHED)
def test_bubble_rates_are_no_higher_than_published(
    ranks: int, microbatches: int, f: float, b: float, w: float, transfer: float, rate_1p: float, rate_2p: float
) -> None:
    spec = ScheduleSpec(ranks, microbatches, costs=Costs.uniform(ranks, f, b, w, transfer=transfer))
    assert spec.costs
    for schedule, published in ((zb_1p, rate_1p), (zb_2p, rate_2p)):
        longest, _ = spans(schedule(spec), microbatches, spec.costs)
        assert (longest - microbatches * (f + b + w)) / longest <= published + 0.00005


@pytest.mark.parametrize(
    ("microbatches", "costs", "longest_1p", "longest_2p"),
    [(8, (1, 1, 1, 0), 27, 24), (8, (10, 13, 7, 1), 300, 266), (12, (10, 13, 7, 1), 420, 365)],
)
def test_four_ranks_reach_the_optimum(
    microbatches: int, costs: tuple[float, float, float, float], longest_1p: float, longest_2p: float
) -> None:
    f, b, w, transfer = costs
    spec = ScheduleSpec(4, microbatches, costs=Costs.uniform(4, f, b, w, transfer=transfer))
    assert spec.costs
    assert spans(zb_1p(spec), microbatches, spec.costs)[0] == longest_1p
    assert spans(zb_2p(spec), microbatches, spec.costs)[0] == longest_2p


@given(spec=specs())
def test_every_order_is_complete_and_proven(spec: ScheduleSpec) -> None:
    order = program(zb_auto(spec), spec.microbatches)
    for rank, stream in enumerate(order.streams):
        for op in (Op.F, Op.B, Op.W):
            found = [(part.stage, part.microbatch) for part in instructions_of(stream) if part.op is op]
            assert found == [(rank, mb) for mb in range(spec.microbatches)]
    check(add_step(add_reduce(add_transfers(order, Costs.uniform(spec.ranks), gated=False), replicas=1)))


@given(spec=specs())
def test_no_rank_saves_more_than_the_limit(spec: ScheduleSpec) -> None:
    assert spec.memory_limit
    assert max(peak_activations(program(zb_auto(spec), spec.microbatches))) <= spec.memory_limit


@given(spec=specs())
def test_never_longer_than_zb_h1_or_zb_h2_within_the_limit(spec: ScheduleSpec) -> None:
    assert spec.memory_limit and spec.costs
    longest, _ = spans(zb_auto(spec), spec.microbatches, spec.costs)
    for known in (zb_h1, zb_h2):
        streams = known(spec)
        if max(peak_activations(program(streams, spec.microbatches))) <= spec.memory_limit:
            assert longest <= spans(streams, spec.microbatches, spec.costs)[0] * (1 + 1e-9)


@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 1), (1, 5), (4, 1), (4, 3), (4, 8), (5, 13)])
def test_a_limit_of_one_microbatch_runs_them_one_after_another(ranks: int, microbatches: int) -> None:
    streams = zb_auto(ScheduleSpec(ranks, microbatches, memory_limit=1))
    assert all([part.op for part in instructions_of(stream)] == [Op.F, Op.B, Op.W] * microbatches for stream in streams)


@pytest.mark.parametrize(("limit", "longest"), [(2, 289), (4, 151), (6, 109), (8, 103), (16, 96), (None, 96)])
def test_more_memory_leaves_less_bubble(limit: float | None, longest: float) -> None:
    streams = zb_auto(ScheduleSpec(8, 32, memory_limit=limit))
    assert spans(streams, 32, Costs.uniform(8))[0] <= longest


def test_a_slow_last_stage_determines_the_step() -> None:
    costs = Costs((1, 1, 1, 1.4), (1, 1, 1, 1.4), (1, 1, 1, 1.4))
    longest, _ = spans(zb_2p(ScheduleSpec(4, 16, costs=costs)), 16, costs)
    assert longest == pytest.approx(16 * 3 * 1.4)


def test_a_given_limit_replaces_the_default() -> None:
    assert zb_2p(ScheduleSpec(4, 8, memory_limit=4)) == zb_1p(ScheduleSpec(4, 8))
    assert zb_1p(ScheduleSpec(4, 8, memory_limit=8)) == zb_2p(ScheduleSpec(4, 8))


def test_the_unit_of_the_costs_does_not_matter() -> None:
    """Sums that should be equal may differ in the last bit, which must not affect the order."""
    orders = {
        zb_2p(ScheduleSpec(8, 64, costs=Costs.uniform(8, 18.546 * s, 18.097 * s, 9.321 * s, transfer=0.762 * s)))
        for s in (1, 1e-3, 1e3)
    }
    assert len(orders) == 1


@pytest.mark.parametrize("limit", [0.5, 0, -1, float("nan")])
def test_a_limit_below_one_microbatch_is_refused(limit: float) -> None:
    with pytest.raises(PentadError, match=f"^memory_limit is {limit:g}: expected at least 1 for schedule zb-2p$"):
        generate("zb-2p", 4, 8, ScheduleOptions(memory_limit=limit))


@pytest.mark.quiet
@pytest.mark.parametrize(("ranks", "microbatches", "seconds"), [(8, 32, 0.15), (32, 128, 3)])
def test_planning_is_quick(ranks: int, microbatches: int, seconds: float) -> None:
    def took() -> float:
        start = time.process_time()
        zb_2p(ScheduleSpec(ranks, microbatches))
        return time.process_time() - start

    assert min(took() for _ in range(2)) < seconds
