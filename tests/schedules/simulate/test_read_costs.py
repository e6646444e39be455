"""Costs read from a measured timeline."""

from dataclasses import replace

import pytest
from schedule_sizes import CATALOGUE

from pentad.schedules.compiler import compile_program
from pentad.schedules.ir.instruction import RECEIVES, SENDS
from pentad.schedules.simulate.costs import Costs
from pentad.schedules.simulate.read_costs import read_costs
from pentad.schedules.simulate.simulate import simulate
from pentad.schedules.simulate.timeline import Span, Timeline

TRANSFER = 0.05


def as_measured(timeline: Timeline) -> Timeline:
    """The timeline with receives that begin as soon as the one before them on their lane has ended, and then wait for
    their sender."""
    ready, spans = dict[tuple[int, str], float](), list[Span]()
    for span in sorted(timeline.spans, key=lambda span: span.end):
        if span.op in RECEIVES:
            spans.append(span._replace(start=ready.get((span.rank, span.lane), 0.0)))
            ready[span.rank, span.lane] = span.end
        else:
            spans.append(span)
    return Timeline("measured", tuple(spans))


@pytest.mark.parametrize("name", CATALOGUE)
def test_the_time_of_a_transfer_has_no_waiting_for_the_other_end(name):
    program = compile_program(name, 2, 8)
    seconds = tuple(1 + 0.2 * stage for stage in range(program.stages))
    timeline = as_measured(simulate(program, Costs(seconds, seconds, seconds, transfer=TRANSFER)))
    assert min(span.end - span.start for span in timeline.spans if span.op in RECEIVES) > 1.1 * TRANSFER
    costs = read_costs(program, timeline)
    assert costs is not None
    assert costs.transfer == pytest.approx(TRANSFER)
    late = tuple(span._replace(end=span.end + 1) if span.op in SENDS else span for span in timeline.spans)
    assert read_costs(program, replace(timeline, spans=late)) == costs  # sends that notice their end late
