"""Timelines survive files and measure idle time by both definitions; costs are positive."""

from __future__ import annotations

from math import inf, nan
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pentad.schedules.compiler import compile_program
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.ir.instruction import Instruction, Op
from pentad.schedules.simulate.costs import Costs
from pentad.schedules.simulate.simulate import simulate
from pentad.schedules.simulate.timeline import SCHEMA, Span, Timeline, attributed_seconds

TIMES = st.floats(-1e9, 1e9)
SMALL = st.integers(-1, 2**31 - 1)
SPANS = st.builds(
    lambda times, *fields: Span(*fields, *sorted(times)),
    st.tuples(TIMES, TIMES),
    st.integers(0, 2**62),
    st.integers(0, 2**31 - 1),
    st.text(max_size=9),
    st.text(max_size=9),
    st.sampled_from(Op).map(str),
    *[SMALL] * 3,
)


def span(rank: int, op: str, start: float, end: float, step: int = 0) -> Span:
    return Span(step, rank, "compute", f"0{op}0", op, 0, 0, -1, start, end)


def test_the_halves_of_a_pair_share_its_time_and_others_have_their_own() -> None:
    single = [span(0, "F", 0, 3), span(0, "B", 3, 5), span(0, "SEND_F", 6, 9), span(1, "F", 6, 7)]
    pair = [span(0, "BW", 5, 14), span(0, "F", 6, 12)]
    spans = [*single, *pair]
    assert list(attributed_seconds(spans)) == list(zip(spans, (3, 2, 3, 1, 6, 3), strict=True))


@given(st.sampled_from(["simulated", "measured"]), st.lists(SPANS, max_size=20).map(tuple))
def test_a_timeline_is_read_as_it_was_written(source: str, spans: tuple[Span, ...]) -> None:
    timeline = Timeline(source, spans)
    assert Timeline.from_arrow(timeline.to_arrow()) == timeline
    assert timeline.to_arrow().schema.equals(SCHEMA)


def test_a_timeline_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    program = compile_program("dualpipe", 4, 8, replicas=2)
    timeline = simulate(program, Costs.uniform(4, transfer=0.5), step=7)
    timeline.save(tmp_path / "timeline.arrow")
    assert Timeline.load(tmp_path / "timeline.arrow") == timeline
    assert timeline.steps == (7,)


def test_a_file_that_is_no_timeline_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "timeline.arrow"
    with pytest.raises(PentadError, match=r"timeline\.arrow is not a readable timeline: "):
        Timeline.load(path)
    path.write_bytes(b"garbage")
    with pytest.raises(PentadError, match=r"timeline\.arrow is not a readable timeline: ") as caught:
        Timeline.load(path)
    assert "\n" not in str(caught.value)
    compile_program("1f1b", 2, 2).save(path)
    with pytest.raises(PentadError, match="the Arrow table is not a timeline"):
        Timeline.load(path)
    with pytest.raises(PentadError, match=r"the Arrow table is not a timeline: its columns are \['x'\]"):
        Timeline.from_arrow(pa.table({"x": [1]}))


def test_the_two_bubbles_relate_to_different_lengths() -> None:
    """Rank 0 works for 2 + 2 of its own 6 seconds, rank 1 for all of its own 4; together they span 8 seconds."""
    spans = (span(0, "F", 10, 12), span(0, "B", 14, 16), span(1, "F", 14, 16), span(1, "BW", 16, 18))
    waiting = Span(0, 1, "RECV_F<0", "1RECV_F0", "RECV_F", 1, 0, 0, 0.0, 14.0)  # only compute counts
    timeline = Timeline("measured", (*spans, waiting))
    assert timeline.busy_by_rank == {0: (10, 16, 4), 1: (14, 18, 4)}
    assert (timeline.longest, timeline.makespan) == (6, 8)
    assert timeline.bubble().longest == pytest.approx(1 - 4 / 6)
    assert timeline.bubble().makespan == pytest.approx(1 - 4 / 8)


@given(st.lists(st.tuples(st.integers(0, 3), st.floats(0, 100), st.floats(0.01, 10)), min_size=1, max_size=12))
def test_longest_is_never_longer_than_the_makespan(drawn: list[tuple[int, float, float]]) -> None:
    timeline = Timeline("measured", tuple(span(rank, "F", start, start + length) for rank, start, length in drawn))
    assert timeline.longest <= timeline.makespan
    assert timeline.bubble().longest <= timeline.bubble().makespan < 1


def test_steps_and_ranks_are_separate() -> None:
    timeline = Timeline(
        "measured", (span(1, "F", 5, 6, step=3), span(0, "F", 1, 2, step=2), span(0, "F", 6, 8, step=3))
    )
    assert (timeline.steps, timeline.ranks) == ((2, 3), (0, 1))
    assert timeline.of_step(3).makespan == 3
    assert [s.step for s in timeline.of_step(2).spans] == [2]


@pytest.mark.parametrize("wrong", [0.0, -1.0, nan, inf])
@pytest.mark.parametrize(("place", "name"), list(enumerate("FBW")))
def test_costs_that_are_not_positive_are_refused(wrong: float, place: int, name: str) -> None:
    costs = [1.0, 1.0, 1.0]
    costs[place] = wrong
    with pytest.raises(PentadError, match=f"^--costs: {name} is {wrong}: expected a finite number greater than 0$"):
        Costs.uniform(4, *costs)


@pytest.mark.parametrize("wrong", [-0.5, nan, inf])
def test_transfers_cannot_take_negative_time(wrong: float) -> None:
    with pytest.raises(PentadError, match=f"^--comm is {wrong}: expected "):
        Costs.uniform(4, transfer=wrong)
    assert Costs.uniform(4, transfer=0.0).transfer == 0.0


def test_a_chunk_costs_its_share_and_bw_as_much_as_b_and_w() -> None:
    costs = Costs.uniform(8, 2.0, 4.0, 6.0, chunks=2, transfer=0.5)
    assert costs.forward == (1.0,) * 8
    found = {op: costs.seconds(Instruction(op, 3, 0)) for op in Op}
    assert [found[op] for op in (Op.F, Op.B, Op.W, Op.BW)] == [1.0, 2.0, 3.0, 5.0]
    assert {found[op] for op in (Op.SEND_F, Op.RECV_F, Op.SEND_B, Op.RECV_B)} == {0.5}


def test_launches_are_added_to_compute_only() -> None:
    each = (1.0, 2.0)
    costs = Costs(each, each, each, transfer=3.0, reduce=(7.0, 4.0), norm=5.0, step=6.0, launch=0.25)
    found = [
        costs.seconds(Instruction(op, 1, 0))
        for op in (Op.F, Op.B, Op.W, Op.BW, Op.SEND_F, Op.ALL_REDUCE, Op.NORM, Op.STEP)
    ]
    assert found == [2.25, 2.25, 2.25, 4.25, 3.0, 4.0, 5.0, 6.0]
