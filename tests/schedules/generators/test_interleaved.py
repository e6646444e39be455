"""Interleaved schedules: published rates, formulas for idle time and activations, groups of any size."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pentad.schedules.catalogue import generate
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.simulate.costs import Costs
from pentad.schedules.simulate.dependencies import compute_times
from pentad.schedules.simulate.memory import peak_activations
from pentad.schedules.spec.schedule_spec import ScheduleOptions

# (ranks, chunks, microbatches, F, B, W, transfer in ms, rate of 1F1B-I); chunks = (layers + 2) / ranks.
# Qi et al. 2023, arXiv 2401.10241: inputs in table 9, rates in table 5.
PUBLISHED = [
    (8, 3, 24, 18.522, 18.086, 9.337, 0.601, 0.1055),
    (8, 3, 32, 18.513, 18.086, 9.331, 0.626, 0.0818),
    (8, 3, 64, 18.546, 18.097, 9.321, 0.762, 0.0443),
    (8, 4, 24, 29.718, 29.444, 19.927, 0.527, 0.0808),
    (8, 4, 32, 29.802, 29.428, 19.530, 0.577, 0.0628),
    (8, 4, 64, 29.935, 29.621, 19.388, 0.535, 0.0320),
    (16, 3, 48, 11.347, 11.248, 8.132, 0.377, 0.1104),
    (16, 3, 64, 11.307, 11.254, 8.101, 0.379, 0.0852),
    (16, 3, 128, 11.325, 11.308, 8.109, 0.378, 0.0445),
    (32, 2, 96, 10.419, 10.207, 7.715, 0.408, 0.1493),
    (32, 2, 128, 10.408, 10.204, 7.703, 0.408, 0.1164),
    (32, 2, 256, 10.402, 10.248, 7.698, 0.460, 0.0624),
]
SIZES = st.tuples(st.integers(1, 6), st.integers(1, 20), st.integers(1, 3), st.integers(0, 9))


def longest(
    name: str, ranks: int, microbatches: int, options: ScheduleOptions, costs: tuple[float, float, float, float]
) -> float:
    program = generate(name, ranks, microbatches, options)
    f, b, w, transfer = costs
    times = compute_times(program, Costs.uniform(program.stages, f, b, w, chunks=program.chunks, transfer=transfer))
    return max(spans[-1][1] - spans[0][0] for spans in times)


@pytest.mark.parametrize(("ranks", "chunks", "m", "f", "b", "w", "transfer", "rate"), PUBLISHED)
def test_published_rates_are_reproduced_to_four_decimals(ranks, chunks, m, f, b, w, transfer, rate):
    """In the published script only the first microbatch of a group waits for the transfer from the last rank to the
    first; here all do, which takes one more transfer per rank."""
    found = longest("interleaved", ranks, m, ScheduleOptions(chunks=chunks), (f, b, w, transfer)) - ranks * transfer
    assert (found - m * (f + b + w)) / found == pytest.approx(rate, abs=0.00005)


@pytest.mark.parametrize("name", ["interleaved", "interleaved-zb"])
@given(size=SIZES)
def test_groups_of_any_size_give_an_order_that_runs(name, size):
    ranks, microbatches, chunks, more = size
    group = min(ranks, microbatches) + more
    program = generate(name, ranks, microbatches, ScheduleOptions(chunks=chunks, group=group))
    compute_times(program, Costs.uniform(program.stages))


@given(st.integers(1, 8), st.integers(1, 4), st.integers(1, 4), st.integers(0, 8), st.tuples(*[st.floats(0.5, 2)] * 3))
def test_idle_time_is_that_of_1f1b_divided_by_the_chunks_for_any_group(ranks, chunks, rounds, more, costs):
    """(p-1)(F+B+W)/v without transfers, if all groups have the same size of at least p."""
    group = ranks + more
    found = longest("interleaved", ranks, rounds * group, ScheduleOptions(chunks=chunks, group=group), (*costs, 0.0))
    assert found - rounds * group * sum(costs) == pytest.approx((ranks - 1) * sum(costs) / chunks)


@given(st.integers(1, 8), st.integers(1, 4), st.integers(1, 4))
def test_interleaved_zb_idle_time_is_that_of_zb_h1_divided_by_the_chunks(ranks, chunks, rounds):
    """(p-1)(F+B-W)/v at equal costs."""
    found = longest("interleaved-zb", ranks, rounds * ranks, ScheduleOptions(chunks=chunks), (1.0, 1.0, 1.0, 0.0))
    assert found - 3 * rounds * ranks == pytest.approx((ranks - 1) / chunks)


@given(st.integers(1, 8), st.integers(1, 4), st.integers(0, 6))
def test_peak_activations_of_the_first_rank(ranks, chunks, more):
    """(2(p-1) + (v-1)N + 1)/v microbatches of a rank, with enough microbatches in groups of N."""
    group = ranks + more
    program = generate("interleaved", ranks, 4 * group, ScheduleOptions(chunks=chunks, group=group))
    expected = (2 * (ranks - 1) + (chunks - 1) * group + 1) / chunks
    assert peak_activations(program)[0] == pytest.approx(expected)


@given(st.integers(1, 8), st.integers(1, 24))
def test_one_chunk_without_groups_is_the_plain_schedule(ranks, microbatches):
    one = ScheduleOptions(chunks=1)
    assert (
        generate("interleaved-zb", ranks, microbatches, one).streams == generate("zb-h1", ranks, microbatches).streams
    )
    eager = generate("1f1b-eager", ranks, microbatches)
    assert generate("interleaved", ranks, microbatches, one).streams == eager.streams


def test_a_group_that_leaves_ranks_idle_is_refused():
    with pytest.raises(PentadError, match=r"^group is 2: expected at least 4 for schedule interleaved$"):
        generate("interleaved", 4, 8, ScheduleOptions(group=2))
