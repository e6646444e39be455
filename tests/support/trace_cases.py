"""Timelines for the tests of trace files."""

from __future__ import annotations

from pentad.schedules.compiler import compile_program
from pentad.schedules.simulate.costs import Costs
from pentad.schedules.simulate.simulate import simulate
from pentad.schedules.simulate.timeline import Timeline


def simulated(name: str, transfer: float = 7e-5) -> Timeline:
    program = compile_program(name, 4, 8, replicas=2)
    return simulate(program, Costs.uniform(program.stages, 1e-3, 1.1e-3, 0.9e-3, transfer=transfer))


def measured(timeline: Timeline, steps: int = 2) -> Timeline:
    """Steps in Unix time, with receives posted long before their sends."""
    early = {"RECV_F": -4e-4, "RECV_B": -4e-4}
    spans = [
        span._replace(step=step, start=1.8e9 + step + span.start + early.get(span.op, 0), end=1.8e9 + step + span.end)
        for step in range(steps)
        for span in timeline.spans
    ]
    return Timeline("measured", tuple(spans))
