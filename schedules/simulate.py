"""Predicts when every instruction of a program runs."""

from __future__ import annotations

from itertools import accumulate

from pentad.schedules.costs import Costs
from pentad.schedules.graph import build, ordered
from pentad.schedules.instruction import Unit
from pentad.schedules.program import Program
from pentad.schedules.timeline import Span, Timeline


def simulate(program: Program, costs: Costs, *, step: int = 0) -> Timeline:
    """Every event starts when all it waits for has ended and lasts as long as its costliest member.

    The program must have passed `check`; compute-only programs are simulated once their transfers are added.
    """
    graph = build(program)
    ends = [0.0] * len(graph.members)
    starts = [0.0] * len(graph.members)
    for event in ordered(graph):
        starts[event] = max((ends[earlier] for earlier in graph.before[event]), default=0.0)
        units = [program.streams[node.rank][node.at] for node in graph.members[event]]
        ends[event] = max(_moments(unit, starts[event], costs)[-1] for unit in units)
    spans = []
    for node in graph.nodes:
        unit = program.streams[node.rank][node.at]
        moments = _moments(unit, starts[graph.event[node]], costs)
        for part, start, end in zip(unit.parts, moments, moments[1:], strict=False):
            where = (part.op.value, part.stage, part.microbatch, part.peer)
            spans.append(Span(step, node.rank, part.lane, str(part.key), *where, start, end))
    return Timeline("simulated", tuple(spans))


def _moments(unit: Unit, start: float, costs: Costs) -> list[float]:
    """When a unit starts, and when each of its parts ends: one after the other."""
    return list(accumulate((costs.of(part) for part in unit.parts), initial=start))
