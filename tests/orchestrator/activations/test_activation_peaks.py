"""The bytes of activations that a rank holds along its stream."""

from __future__ import annotations

import pytest
from plans import plan_of

from pentad.orchestrator.activations.activation_peaks import activation_peak
from pentad.schedules.ir.instruction import Overlap
from pentad.schedules.ir.program import Program
from pentad.schedules.spec.plan import Plan


def peaks(plan: Plan, program: Program) -> list[int]:
    return [activation_peak(plan, program, plan.mesh.move(0, pp=pp)).device for pp in range(program.ranks)]


def one_after_the_other(program: Program, *, backward_first: bool) -> Program:
    """The program with overlapped pairs split into two instructions each."""
    streams = []
    for stream in program.streams:
        parts = [action.parts[:: -1 if backward_first else 1] for action in stream]
        streams.append(tuple(part for pair in parts for part in pair))
    return program.with_streams(tuple(streams))


@pytest.mark.parametrize(("name", "pp", "m"), [("dualpipev", 2, 8), ("dualpipe", 4, 8)])
def test_the_forward_of_a_pair_follows_its_backward_where_layers_do_not_communicate(corpus, name, pp, m):
    plan = plan_of(name=name, dp=1, pp=pp, microbatches=m, data=corpus)
    assert any(isinstance(action, Overlap) for stream in plan.program.streams for action in stream)
    after, before = (one_after_the_other(plan.program, backward_first=first) for first in (True, False))
    assert peaks(plan, plan.program) == peaks(plan, after)
    assert sum(peaks(plan, after)) < sum(peaks(plan, before))
    for tp, cp in ((2, 1), (1, 2)):
        shared = plan_of(name=name, dp=1, pp=pp, microbatches=m, data=corpus, tp=tp, cp=cp)
        assert peaks(shared, shared.program) == peaks(shared, one_after_the_other(shared.program, backward_first=False))
