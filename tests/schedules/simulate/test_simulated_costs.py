"""Slow ranks, slow links, compute that transfers slow down, and jitter do to a simulated step what they say."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from math import inf, nan
from statistics import fmean, stdev
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pentad.schedules.catalogue import generate
from pentad.schedules.compiler import compile_program
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.ir.instruction import Instruction, Op
from pentad.schedules.simulate.costs import Costs
from pentad.schedules.simulate.dependencies import compute_times
from pentad.schedules.simulate.simulate import factor, simulate
from pentad.schedules.simulate.timeline import COMPUTE, Span

PROGRAMS = [("gpipe", 3, 4), ("1f1b", 4, 6), ("zb-h1", 3, 5), ("zb-v", 3, 6), ("dualpipe", 4, 8)]
SECONDS = st.floats(0.1, 4)
compiled = cache(compile_program)


def costs_of(stages: int, **more: Any) -> Costs:
    each = [tuple(1 + (stage * k % 7) / 8 for stage in range(stages)) for k in (1, 2, 3)]
    return replace(Costs(each[0], each[1], each[2], transfer=0.3, reduce=0.7, norm=0.2, step=0.4, launch=0.1), **more)


def named(spans: tuple[Span, ...]) -> dict[tuple[int, str], Span]:
    return {(span.rank, span.name): span for span in spans}


@pytest.mark.parametrize(("name", "ranks", "microbatches"), PROGRAMS)
def test_a_slow_rank_computes_slower_and_nothing_else_does(name: str, ranks: int, microbatches: int) -> None:
    program = compiled(name, ranks, microbatches, replicas=2)
    factors = tuple(1 + 0.25 * (rank == 1) for rank in range(ranks))
    plain = named(simulate(program, costs_of(program.stages)).spans)
    slow = named(simulate(program, costs_of(program.stages, slow=factors)).spans)
    for place, span in slow.items():
        alone = plain[place].end - plain[place].start
        assert span.end - span.start == pytest.approx(alone * (factors[span.rank] if span.op in COMPUTE else 1))


@pytest.mark.parametrize(("name", "ranks", "microbatches"), PROGRAMS)
def test_a_transfer_takes_what_its_link_takes_at_both_ends(name: str, ranks: int, microbatches: int) -> None:
    program = compiled(name, ranks, microbatches)
    links = tuple(tuple(0.1 * (1 + source) + target for target in range(ranks)) for source in range(ranks))
    for span in simulate(program, costs_of(program.stages, links=links)).spans:
        if span.op.startswith(("SEND", "RECV")):
            ends = (span.rank, span.peer) if span.op.startswith("SEND") else (span.peer, span.rank)
            assert span.end - span.start == pytest.approx(links[ends[0]][ends[1]])


def test_links_that_are_all_alike_are_one_transfer_cost() -> None:
    program = compiled("zb-v", 3, 6)
    alike = costs_of(6, links=((0.3,) * 3,) * 3)
    assert simulate(program, alike) == simulate(program, costs_of(6))


@pytest.mark.parametrize(("name", "ranks", "microbatches"), PROGRAMS)
@given(overlap=st.floats(0.01, 2), transfer=SECONDS, reduce=SECONDS)
@settings(max_examples=5, deadline=None)
def test_compute_is_slower_exactly_while_its_rank_transfers(
    name: str, ranks: int, microbatches: int, overlap: float, transfer: float, reduce: float
) -> None:
    """What a compute instruction takes is its cost, and `overlap` of what it gets done while something is moved."""
    program = compiled(name, ranks, microbatches, replicas=2)
    costs = costs_of(program.stages, overlap=overlap, transfer=transfer, reduce=reduce)
    spans = simulate(program, costs).spans
    for rank in range(ranks):
        mine = [span for span in spans if span.rank == rank]
        moves = sorted((s.start, s.end) for s in mine if s.op not in COMPUTE and s.op != "STEP")
        for span in mine:
            if span.op in COMPUTE:
                under, until = 0.0, span.start
                for start, end in moves:
                    under += max(0.0, min(end, span.end) - max(start, until))
                    until = max(until, min(end, span.end))
                took = span.end - span.start - under * overlap / (1 + overlap)
                assert took == pytest.approx(costs.of(Instruction(Op(span.op), span.stage, span.microbatch)))
            else:
                assert span.end - span.start == pytest.approx(
                    costs.of(Instruction(Op(span.op), span.stage, span.microbatch))
                )


@pytest.mark.parametrize(("name", "ranks", "microbatches"), PROGRAMS)
def test_next_to_no_overlap_is_no_overlap(name: str, ranks: int, microbatches: int) -> None:
    program = compiled(name, ranks, microbatches, replicas=2)
    plain = simulate(program, costs_of(program.stages))
    almost = simulate(program, costs_of(program.stages, overlap=1e-12))
    for one, other in zip(plain.spans, almost.spans, strict=True):
        assert one[:8] == other[:8]
        assert other[8:] == pytest.approx(one[8:])


def test_a_forward_under_a_transfer_takes_longer_by_the_overlap() -> None:
    """Rank 0 sends its first result from 1 to 1.5: at half the pace, the second forward gets a quarter done."""
    spans = named(simulate(compiled("gpipe", 2, 2), replace(Costs.uniform(2, transfer=0.5), overlap=1.0)).spans)
    assert spans[0, "0SEND_F0"][8:] == spans[1, "1RECV_F0"][8:] == (1.0, 1.5)
    assert spans[0, "0F1"][8:] == (1.0, 2.25)
    assert spans[1, "1F0"].start == 1.5


@given(st.integers(0, 2**40), st.floats(0.01, 0.5))
@settings(max_examples=10)
def test_jitter_is_the_same_for_the_same_seed_rank_and_instruction(seed: int, jitter: float) -> None:
    """And whatever order they run in: gpipe's and 1f1b's instructions are the same ones."""
    costs = costs_of(3)
    one, other = (simulate(compiled(name, 3, 4), costs, jitter=jitter, seed=seed) for name in ("gpipe", "1f1b"))
    assert simulate(compiled("gpipe", 3, 4), costs, jitter=jitter, seed=seed) == one
    assert simulate(compiled("gpipe", 3, 4), costs, jitter=jitter, seed=seed + 1) != one
    times = named(other.spans)
    for place, span in named(one.spans).items():
        assert span.end - span.start == pytest.approx(times[place].end - times[place].start)


def test_jitter_has_mean_1_and_its_sigma() -> None:
    drawn = [factor(5, rank, Instruction(Op.F, 0, mb), 0.1) for rank in range(20) for mb in range(200)]
    assert fmean(drawn) == pytest.approx(1, abs=0.01)
    assert stdev(drawn) == pytest.approx(0.1, abs=0.01)
    assert len(set(drawn)) == len(drawn)


def test_no_jitter_and_equal_speeds_change_nothing() -> None:
    program = compiled("dualpipe", 4, 8)
    plain = simulate(program, costs_of(4))
    assert simulate(program, costs_of(4, slow=(1.0,) * 4), jitter=0.0, seed=9) == plain


WRONG = [
    ({"slow": (1.0, 2.0)}, "costs.slow has 2 factors, but there are 3 ranks"),
    ({"slow": (1.0, 0.0, 1.0)}, "costs.slow of rank 1 is 0.0, but "),
    ({"slow": (1.0, 1.0, nan)}, "costs.slow of rank 2 is nan, but "),
    ({"overlap": -0.1}, "costs.overlap is -0.1, but "),
    ({"overlap": inf}, "costs.overlap is inf, but "),
    ({"links": ((0.0,) * 3,) * 2}, r"costs.links has rows of \[3, 3\] entries, but "),
    ({"links": ((0.0,) * 3, (0.0,) * 2, (0.0,) * 3)}, r"costs.links has rows of \[3, 2, 3\] entries, but "),
    ({"links": ((0.0,) * 3, (0.0, 0.0, -1.0), (0.0,) * 3)}, "costs.links from rank 1 to rank 2 is -1.0, but "),
]


@pytest.mark.parametrize(("more", "text"), WRONG, ids=[text.split(",")[0] for _, text in WRONG])
def test_costs_of_other_ranks_are_refused_in_one_sentence(more: dict[str, Any], text: str) -> None:
    with pytest.raises(PentadError, match=f"^{text}"):
        simulate(compiled("gpipe", 3, 4), costs_of(3, **more))


@pytest.mark.parametrize("wrong", [-0.1, nan, inf])
def test_jitter_is_finite_and_not_negative(wrong: float) -> None:
    with pytest.raises(PentadError, match=f"^jitter is {wrong}, but "):
        simulate(compiled("gpipe", 3, 4), costs_of(3), jitter=wrong)


@pytest.mark.parametrize(("name", "ranks", "microbatches"), [("gpipe", 3, 4), ("1f1b", 4, 6), ("zb-h1", 3, 5)])
def test_orders_are_timed_with_the_speeds_and_links_of_ranks_too(name: str, ranks: int, microbatches: int) -> None:
    """As the simulator does, where no transfer queues: every one takes less than any instruction."""
    slow = tuple(1 + rank / 4 for rank in range(ranks))
    links = tuple(tuple(0.02 * (1 + source + 2 * target) for target in range(ranks)) for source in range(ranks))
    costs = replace(costs_of(ranks), slow=slow, links=links)
    order = generate(name, ranks, microbatches)
    spans = named(simulate(compile_program(name, ranks, microbatches, costs=costs), costs).spans)
    for rank, times in enumerate(compute_times(order, costs)):
        for unit, (start, end) in zip(order.streams[rank], times, strict=True):
            span = spans[rank, str(unit.key)]
            assert [span.start, span.end] == pytest.approx([start, end])
