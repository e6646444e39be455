"""Predicts when every instruction of a program runs."""

from __future__ import annotations

from pentad.schedules.costs import Costs
from pentad.schedules.graph import build, ordered
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
        units = [program.streams[node.rank][node.index] for node in graph.members[event]]
        ends[event] = starts[event] + max(sum(costs.of(part) for part in unit.parts) for unit in units)
    spans = []
    for node in graph.nodes:
        start = starts[graph.event[node]]
        for part in program.streams[node.rank][node.index].parts:
            end = start + costs.of(part)
            where = (part.op.value, part.stage, part.microbatch, part.peer)
            spans.append(Span(step, node.rank, part.lane, str(part.key), *where, start, end))
            start = end
    return Timeline("simulated", tuple(spans))
