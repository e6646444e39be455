"""Costs as measured, from the timeline of a run."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from pentad.schedules.ir.instruction import RECEIVES, SENDS, Op
from pentad.schedules.ir.program import Program
from pentad.schedules.simulate.costs import Costs
from pentad.schedules.simulate.timeline import Span, Timeline, attributed_seconds


def read_costs(program: Program, timeline: Timeline) -> Costs | None:
    """Measured costs: medians over the spans of an op on a stage, or None if a stage lacks an op of the program.

    Half of a BW counts as B and half as W, and `attributed_seconds` divides the time of overlapped pairs. Collectives
    count their shortest span, since the others contain waiting, and transfers the time in which both ends take part.
    """
    seconds: dict[tuple[str, int], list[float]] = {}
    for span, took in attributed_seconds(timeline.spans):
        seconds.setdefault((span.op, span.stage), []).append(max(took, 1e-9))

    def of(op: Op, stage: int) -> float:
        if (op, stage) in seconds:
            return median(seconds[op, stage])
        return median(seconds.get((Op.BW, stage), [0.0])) / 2

    def shortest(*ops: Op) -> float:
        return min((min(times) for (op, _), times in seconds.items() if op in ops), default=0.0)

    def shortest_by_stage(op: Op) -> tuple[float, ...]:
        found = tuple(min(seconds.get((op, stage), [0.0])) for stage in range(program.stages))
        return found if any(found) else ()

    stages = range(program.stages)
    forward, backward, weight = (tuple(of(op, s) for s in stages) for op in (Op.F, Op.B, Op.W))
    if not all(forward if program.forward_only else (*forward, *backward, *weight)):
        return None
    recompute, offload = (
        tuple(of(op, s) if (op, s) in seconds else 0.0 for s in stages) for op in (Op.RECOMPUTE, Op.OFFLOAD)
    )
    return Costs(
        forward,
        backward,
        weight,
        transfer=median(_transfers(timeline.spans) or [0.0]),
        norm=shortest(Op.NORM, Op.LOSS),
        step=shortest(Op.STEP),
        validate_step=shortest(Op.VALIDATE),
        recompute=recompute if any(recompute) else (),
        offload=offload if any(offload) else (),
        reduce=shortest_by_stage(Op.ALL_REDUCE) or tuple(2 * each for each in shortest_by_stage(Op.REDUCE_SCATTER)),
        gather=shortest_by_stage(Op.ALL_GATHER),
    )


def _transfers(spans: Sequence[Span]) -> list[float]:
    """Seconds of each transfer while both ends take part: a receive may begin long before its sender has anything to
    send, and a send before its receiver has a free slot."""
    begun = {}
    for span in (span for span in spans if span.op in SENDS):
        stage = span.stage + (1 if span.op == Op.SEND_F else -1)
        begun[span.step, SENDS[Op(span.op)], stage, span.microbatch, span.rank] = span.start
    found = []
    for span in (span for span in spans if span.op in RECEIVES):
        sent = begun.get((span.step, Op(span.op), span.stage, span.microbatch, span.peer))
        if sent is not None:
            found.append(max(0.0, span.end - max(span.start, sent)))
    return found
