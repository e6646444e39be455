"""What test_overlap.py shares with other tests."""

from __future__ import annotations

from dataclasses import replace

from pentad.schedules.ir.instruction import Overlap, units_of
from pentad.schedules.spec.plan import Plan

MESHES = [{"ep": 2}, {"tp": 2}, {"cp": 2}]


def apart(plan: Plan) -> Plan:
    """The same instructions, none of them in pairs."""
    streams = tuple(tuple(units_of(stream)) for stream in plan.program.streams)
    assert any(isinstance(unit, Overlap) for stream in plan.program.streams for unit in stream)
    return replace(plan, program=replace(plan.program, streams=streams))
