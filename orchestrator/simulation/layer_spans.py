"""Messages inside the layers of instructions: as spans of a lane of their own, and as totals by op, stage and axis.

An instruction's messages of one kind become a span that compute hides, at the instruction's start, and one that it
waits for, at its end: only their total time is known, not when the kernels of a layer have them.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

from pentad.orchestrator.planning.cost_model import LayerMessages, layer_messages
from pentad.orchestrator.planning.estimate import costs_of, even_piece, rates_of_plan
from pentad.schedules.draw.page_program import DrawnMessages
from pentad.schedules.ir.instruction import Instruction, Op, instructions_of
from pentad.schedules.simulate.costs import RUNS_KERNELS, Costs
from pentad.schedules.simulate.timeline import Span, Timeline
from pentad.schedules.spec.plan import Plan

LANE = "layers"
OPS = {op.value: op for op in RUNS_KERNELS - {Op.W}}  # W sends nothing


class Part(NamedTuple):
    """Messages of one kind; `share` is their fraction of the instruction's time."""

    name: str
    op: str
    share: float


def with_layer_spans(timeline: Timeline, plan: Plan, costs: Costs) -> Timeline:
    """A simulated timeline of the plan's program, or of all ranks of its mesh, with spans of LANE added. `costs` are
    those at the plan's rates; in a timeline at other costs, messages keep their share of an instruction."""

    @cache
    def parts(op: str, stage: int) -> tuple[list[Part], list[Part]]:
        """Hidden and exposed messages."""
        hidden, exposed = list[Part](), list[Part]()
        if not (seconds := costs.seconds(Instruction(OPS[op], stage))):
            return hidden, exposed
        for each in messages_of(plan, op, stage):
            name = f"{each.axis} {each.kind.replace('_', '-')}"
            exposed.append(Part(f"{name} x{each.operations}", each.kind.upper(), each.seconds / seconds))
            if each.hidden:
                hidden.append(Part(f"{name}, hidden", each.kind.upper(), each.hidden / seconds))
        return hidden, exposed

    def spans(of: Span) -> Iterator[Span]:
        hidden, exposed = parts(of.op, of.stage)
        length = of.end - of.start
        at = of.start
        for part in hidden:
            yield _span(of, part, at, at := at + part.share * length)
        at = of.end - sum(part.share for part in exposed) * length
        for part in exposed:
            yield _span(of, part, at, at := at + part.share * length)

    added = [each for span in timeline.spans if span.op in OPS for each in spans(span)]
    return Timeline(timeline.source, (*timeline.spans, *added))


def planned_messages(plan: Plan) -> tuple[DrawnMessages, ...]:
    """The messages of each op, stage and axis of the plan's program, at the plan's costs."""
    costs = costs_of(plan)
    parts = (part for stream in plan.program.streams for part in instructions_of(stream))
    found = list[DrawnMessages]()
    for op, stage in sorted({(part.op.value, part.stage) for part in parts if part.op.value in OPS}):
        if not (seconds := costs.seconds(Instruction(OPS[op], stage))):
            continue
        messages = list(messages_of(plan, op, stage))
        for axis in dict.fromkeys(each.axis for each in messages):
            its = [each for each in messages if each.axis == axis]
            times = seconds, sum(each.seconds for each in its), sum(each.hidden for each in its)
            found.append(DrawnMessages(op, stage, axis, *(round(time * 1e9) for time in times)))
    return tuple(found)


def messages_of(plan: Plan, op: str, stage: int) -> Iterator[LayerMessages]:
    """The messages inside the layers of a stage, in an instruction with this op."""
    mode = plan.recompute_mode(stage)
    phase = "F" if op == "F" or (op == "RECOMPUTE" and mode == "full") else mode if op == "RECOMPUTE" else "B"
    return layer_messages(plan.model, plan.layers[stage], even_piece(plan), rates_of_plan(plan), phase)


def _span(of: Span, part: Part, start: float, end: float) -> Span:
    return of._replace(lane=LANE, name=f"{of.name} {part.name}", op=part.op, start=start, end=end)
