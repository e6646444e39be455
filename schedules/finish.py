"""Passes for the end of a step: the reduction of gradients between the holders of a stage, and the optimizer."""

from __future__ import annotations

from pentad.schedules.instruction import COMPUTE, Instruction, Key, Op, Unit, units_of
from pentad.schedules.program import Program, Stream, index_of


def add_reduce(program: Program, *, replicas: int, scatter: bool = False) -> Program:
    """An ALL_REDUCE of every stage that more than one rank holds (dp replicas, DualPipe mirrors), after its last W; a
    REDUCE_SCATTER where holders step on a shard each (`scatter`, ZeRO).

    Ranks that hold the same stages reduce them in the order of their numbers, whatever finishes first, since a
    collective meets its partner by position.
    """
    shared = [s for s in range(program.stages) if replicas > 1 or len(program.holders(s)) > 1]
    held = [[stage for stage in shared if stage in stages] for stages in program.placement]
    op = Op.REDUCE_SCATTER if scatter else Op.ALL_REDUCE
    return program.with_streams(tuple(_reduced(*each, op) for each in zip(program.streams, held, strict=True)))


def add_step(program: Program) -> Program:
    """NORM and STEP at the end of every stream: the barrier form, where a step waits for the global norm."""
    return program.with_streams(tuple(stream + _ending(stream) for stream in program.streams))


def _reduced(stream: Stream, stages: list[int], op: Op) -> Stream:
    position = index_of(stream)
    after: dict[int, list[Instruction]] = {}
    place = -1
    for stage in sorted(stages):
        last = max((k for k in position if k.op in (Op.W, Op.BW) and k.stage == stage), key=lambda k: position[k])
        place = max(place, position[last])
        after.setdefault(place, []).append(Instruction(op, stage, group=f"stage{stage}", waits=(last,)))
    woven: list[Unit] = []
    for index, unit in enumerate(stream):
        woven += (unit, *after.get(index, ()))
    return tuple(woven)


def _ending(stream: Stream) -> Stream:
    parts = list(units_of(stream))
    last = next(p.key for p in reversed(parts) if p.op in COMPUTE)
    reduced = tuple(p.key for p in parts if p.op in (Op.ALL_REDUCE, Op.REDUCE_SCATTER))
    norm = Instruction(Op.NORM, group="pp", waits=(last, *reduced))
    return norm, Instruction(Op.STEP, waits=(Key(Op.NORM, -1, -1),))
