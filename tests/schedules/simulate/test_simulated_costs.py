"""Slow ranks and links slow down what runs on them, and nothing else."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from math import nan
from typing import Any

import pytest

from pentad.schedules.catalogue import generate
from pentad.schedules.compiler import compile_program
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.simulate.costs import Costs
from pentad.schedules.simulate.dependencies import compute_times
from pentad.schedules.simulate.simulate import simulate
from pentad.schedules.simulate.timeline import COMPUTE, Span

PROGRAMS = [("gpipe", 3, 4), ("1f1b", 4, 6), ("zb-h1", 3, 5), ("zb-v", 3, 6), ("dualpipe", 4, 8)]
compiled = cache(compile_program)


def costs_of(stages: int, **more: Any) -> Costs:
    each = [tuple(1 + (stage * k % 7) / 8 for stage in range(stages)) for k in (1, 2, 3)]
    return replace(
        Costs(each[0], each[1], each[2], transfer=0.3, reduce=(0.7,) * stages, norm=0.2, step=0.4, launch=0.1), **more
    )


def named(spans: tuple[Span, ...]) -> dict[tuple[int, str], Span]:
    return {(span.rank, span.name): span for span in spans}


@pytest.mark.parametrize(("name", "ranks", "microbatches"), PROGRAMS)
def test_a_slow_rank_computes_slower_and_nothing_else_does(name: str, ranks: int, microbatches: int) -> None:
    program = compiled(name, ranks, microbatches, replicas=2)
    factors = tuple(1 + 0.25 * (rank == 1) for rank in range(ranks))
    plain = named(simulate(program, costs_of(program.stages)).spans)
    slow = named(simulate(program, costs_of(program.stages, slowdown=factors)).spans)
    for place, span in slow.items():
        before = plain[place].end - plain[place].start
        assert span.end - span.start == pytest.approx(before * (factors[span.rank] if span.op in COMPUTE else 1))


@pytest.mark.parametrize(("name", "ranks", "microbatches"), PROGRAMS)
def test_a_transfer_takes_the_time_of_its_link_at_both_ends(name: str, ranks: int, microbatches: int) -> None:
    program = compiled(name, ranks, microbatches)
    links = tuple(tuple(0.1 * (1 + source) + target for target in range(ranks)) for source in range(ranks))
    for span in simulate(program, costs_of(program.stages, links=links)).spans:
        if span.op.startswith(("SEND", "RECV")):
            ends = (span.rank, span.peer) if span.op.startswith("SEND") else (span.peer, span.rank)
            assert span.end - span.start == pytest.approx(links[ends[0]][ends[1]])


def test_equal_links_are_one_transfer_cost() -> None:
    program = compiled("zb-v", 3, 6)
    alike = costs_of(6, links=((0.3,) * 3,) * 3)
    assert simulate(program, alike) == simulate(program, costs_of(6))


def test_equal_speeds_change_nothing() -> None:
    program = compiled("dualpipe", 4, 8)
    assert simulate(program, costs_of(4, slowdown=(1.0,) * 4)) == simulate(program, costs_of(4))


WRONG = [
    ({"slowdown": (1.0, 2.0)}, "costs.slowdown has 2 factors: expected one for each of 3 ranks"),
    ({"slowdown": (1.0, 0.0, 1.0)}, r"costs.slowdown\[1\] is 0.0: expected "),
    ({"slowdown": (1.0, 1.0, nan)}, r"costs.slowdown\[2\] is nan: expected "),
    ({"links": ((0.0,) * 3,) * 2}, r"costs.links has rows of \[3, 3\] entries: expected "),
    ({"links": ((0.0,) * 3, (0.0,) * 2, (0.0,) * 3)}, r"costs.links has rows of \[3, 2, 3\] entries: expected "),
    ({"links": ((0.0,) * 3, (0.0, 0.0, -1.0), (0.0,) * 3)}, r"costs.links\[1\]\[2\] is -1.0: expected "),
]


@pytest.mark.parametrize(("more", "text"), WRONG, ids=[text.split(",")[0] for _, text in WRONG])
def test_costs_that_do_not_fit_the_ranks_are_refused(more: dict[str, Any], text: str) -> None:
    with pytest.raises(PentadError, match=f"^{text}"):
        simulate(compiled("gpipe", 3, 4), costs_of(3, **more))


@pytest.mark.parametrize(("name", "ranks", "microbatches"), [("gpipe", 3, 4), ("1f1b", 4, 6), ("zb-h1", 3, 5)])
def test_compute_orders_are_timed_with_slowdowns_and_links_too(name: str, ranks: int, microbatches: int) -> None:
    """They agree with the simulator if no transfer queues: here all are shorter than any compute instruction."""
    slowdown = tuple(1 + rank / 4 for rank in range(ranks))
    links = tuple(tuple(0.02 * (1 + source + 2 * target) for target in range(ranks)) for source in range(ranks))
    costs = replace(costs_of(ranks), slowdown=slowdown, links=links)
    order = generate(name, ranks, microbatches)
    spans = named(simulate(compile_program(name, ranks, microbatches, costs=costs), costs).spans)
    for rank, times in enumerate(compute_times(order, costs)):
        for action, (start, end) in zip(order.streams[rank], times, strict=True):
            span = spans[rank, str(action.key)]
            assert [span.start, span.end] == pytest.approx([start, end])
