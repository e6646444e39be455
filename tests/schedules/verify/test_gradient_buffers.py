"""Gradients that share a buffer wait for each other's reduction, and each reduction covers its microbatch alone."""

from __future__ import annotations

import pytest

from pentad.schedules.compiler import compile_program
from pentad.schedules.ir.errors import ScheduleError
from pentad.schedules.ir.instruction import Key, Op, instructions_of
from pentad.schedules.ir.program import Program
from pentad.schedules.spec.schedule_spec import MemoryOptions, ScheduleOptions
from pentad.schedules.verify.check import check

EVERY = MemoryOptions(zero=2, reduce="microbatch")


def compiled(name: str, ranks: int, memory_options: MemoryOptions, chunks: int | None = None) -> Program:
    options = ScheduleOptions(chunks)
    return compile_program(name, ranks, 4, replicas=2, memory_options=memory_options, options=options)


def without(program: Program, key: Key) -> Program:
    """The program without an instruction of the first rank, and without waits for it."""
    first, *others = program.streams
    kept = (part for part in instructions_of(first) if part.key != key)
    stream = tuple(part._replace(waits=tuple(each for each in part.waits if each != key)) for part in kept)
    return program.with_streams((stream, *others))


@pytest.mark.parametrize(
    ("name", "options", "chunks"),
    [
        ("1f1b", EVERY._replace(units=(3, 3)), None),
        ("looped-bfs", MemoryOptions(zero=2, units=(1,) * 8, sizes=((64,),) * 8), 4),
        ("looped-bfs", MemoryOptions(zero=3, units=(2,) * 8, sizes=((64,), (48,)) * 8), 4),
    ],
)
def test_a_reduction_or_a_wait_for_one_less_is_refused(name: str, options: MemoryOptions, chunks: int | None) -> None:
    program, tried = compiled(name, 2, options, chunks), 0
    for part in instructions_of(program.streams[0]):
        if part.op is Op.REDUCE_SCATTER:
            with pytest.raises(ScheduleError, match=rf"never reduces .* stage {part.stage}"):
                check(without(program, part.key), replicas=2, zero=options.zero)
        for key in part.waits if part.op is Op.BW else ():
            if key.op is Op.REDUCE_SCATTER:
                fewer = part._replace(waits=tuple(each for each in part.waits if each != key))
                stream, tried = tuple(each if each != part else fewer for each in program.streams[0]), tried + 1
                with pytest.raises(ScheduleError, match=f"{part.key} does not wait for {key}"):
                    check(program.with_streams((stream, program.streams[1])), replicas=2, zero=options.zero)
    assert tried


@pytest.mark.parametrize(
    ("moved", "after", "waits"),
    [
        ((0, 2), (0, 3), {}),
        ((0, 0), (0, 1), {(0, 2): (0, 0)}),
        ((0, 1), (0, 2), {(0, 3): (0, 1)}),
        ((0, 0), (0, 1), {(0, 2): (0, 1)}),
    ],
)
def test_a_sum_of_more_than_its_microbatch_is_refused(
    moved: tuple[int, int], after: tuple[int, int], waits: dict[tuple[int, int], tuple[int, int]]
) -> None:
    """A REDUCE_SCATTER is moved after the next microbatch's W, which no longer waits for it."""
    program = compiled("1f1b", 1, EVERY._replace(units=(2,)))
    scatter, weights = Key(Op.REDUCE_SCATTER, *moved), Key(Op.BW, *after)
    others = {Key(Op.BW, *key): (Key(Op.REDUCE_SCATTER, *to),) for key, to in waits.items()} | {weights: ()}
    parts = {part.key: part for part in instructions_of(program.streams[0])}
    for key, to in others.items():
        kept = tuple(each for each in parts[key].waits if each.op is not Op.REDUCE_SCATTER or each.stage != key.stage)
        parts[key] = parts[key]._replace(waits=(*kept, *to))
    order = [key for key in parts if key != scatter]
    order.insert(order.index(weights) + 1, scatter)
    with pytest.raises(ScheduleError, match=f"{weights} comes before {scatter}"):
        check(program.with_streams((tuple(parts[key] for key in order),)), replicas=2, zero=2)
