"""Every buffer is filled, read and given back, and the most bytes at once are those that a walk of the stream finds."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from seq import seq_order

from pentad.schedules.catalogue import CATALOGUE
from pentad.schedules.compiler import compile_program, lower
from pentad.schedules.ir.errors import ScheduleError
from pentad.schedules.ir.instruction import RECEIVES, SENDS, Instruction, Key, Op, Unit, instructions_of
from pentad.schedules.ir.program import Program, Stream
from pentad.schedules.simulate.costs import Costs
from pentad.schedules.simulate.memory import peak_activations
from pentad.schedules.verify.buffers import KINDS, Sizes, buffers, peak_bytes, prove_buffers

compiled = cache(compile_program)
PROGRAMS = [(name, 4, 8, gated) for name in CATALOGUE for gated in (False, True)]
of_all = pytest.mark.parametrize(("name", "ranks", "microbatches", "gated"), PROGRAMS)


def sizes_of(stages: int) -> Sizes:
    """Every stage keeps something else, and some more until W than until B."""
    saved, deferred = (tuple(100 * k + 7 * stage for stage in range(stages)) for k in (4, 3))
    deferred = tuple(size * (2 if stage % 3 == 1 else 1) for stage, size in enumerate(deferred))
    return Sizes(5, saved, deferred, tuple(10_000 + stage for stage in range(stages)))


def plainly(program: Program, rank: int, sizes: Sizes) -> int:
    """The peak of a rank by a walk along its stream with a table of what is there."""
    stream, kept = program.streams[rank], dict[tuple[str, Key], int]()
    here = {part.key for part in instructions_of(stream)}
    slots = {(part.op, part.slot) for part in instructions_of(stream) if part.op in RECEIVES}
    always = sum(sizes.fixed[stage] for stage in set(program.placement[rank])) + sizes.transfer * len(slots)
    last: dict[str, Key] = {}
    peak = 0
    for part in instructions_of(stream):
        stage, mb = part.stage, part.microbatch
        if part.op in SENDS:
            if part.lane in last:
                del kept["result", last[part.lane]]
            last[part.lane] = part.waits[0]
        elif part.op is Op.F:
            kept["saved", part.key] = sizes.saved[stage]
            kept |= {("result", part.key): sizes.transfer} if stage + 1 < program.stages else {}
        elif part.op is Op.W:
            peak = max(peak, sum(kept.values()))
            del kept["deferred", Key(Op.B, stage, mb)]
        elif part.op in (Op.B, Op.BW):
            saved = kept.pop(("saved", Key(Op.F, stage, mb)))
            kept["deferred", part.key] = sizes.deferred[stage] if part.op is Op.B else max(saved, sizes.deferred[stage])
            kept |= {("result", part.key): sizes.transfer} if stage else {}
        peak = max(peak, sum(kept.values()))
        kept.pop(("deferred", part.key), None) if part.op is Op.BW else None
        for near in (-1, 1) if part.op in (Op.F, Op.B, Op.BW) else ():  # what came from this rank's other stage
            for op in (Op.F,) if part.op is Op.F else (Op.B, Op.BW):
                key = Key(op, stage + near, mb)
                if near == (-1 if part.op is Op.F else 1) and key in here:
                    del kept["result", key]
    assert {kind for kind, _ in kept} <= {"result"}
    assert sorted(key for _, key in kept) == sorted(last.values())
    return always + peak


@of_all
def test_the_peak_is_what_a_walk_along_the_stream_finds(name: str, ranks: int, microbatches: int, gated: bool) -> None:
    program = compiled(name, ranks, microbatches, gated=gated, replicas=2)
    sizes = sizes_of(program.stages)
    assert peak_bytes(program, sizes) == [plainly(program, rank, sizes) for rank in range(ranks)]


@of_all
def test_with_activations_alone_the_peak_is_that_in_microbatches(
    name: str, ranks: int, microbatches: int, gated: bool
) -> None:
    program = compiled(name, ranks, microbatches, gated=gated)
    size, stages = 1000 * program.chunks, program.stages
    sizes = Sizes(0, (size,) * stages, (size // 2,) * stages, (0,) * stages)
    whole = size * program.chunks * program.slices
    assert peak_bytes(program, sizes) == [peak * whole for peak in peak_activations(program)]


def test_slices_keep_as_much_as_they_are() -> None:
    program = lower(seq_order(3, 4, 4), Costs.uniform(3), replicas=2)
    sizes = Sizes(0, (250,) * 3, (0,) * 3, (0,) * 3)
    assert peak_bytes(program, sizes) == [1000 * peak for peak in peak_activations(program)]


@of_all
def test_a_buffer_is_read_behind_what_fills_it_and_before_it_is_free(
    name: str, ranks: int, microbatches: int, gated: bool
) -> None:
    program = compiled(name, ranks, microbatches, gated=gated)
    prove_buffers(program)
    kind, made, used, freed = buffers(program)
    columns = program.columns
    end = np.where(freed < 0, columns.rows, freed)
    assert (made < used).all() and (used <= end).all()
    assert len(set(zip(kind.tolist(), made.tolist(), strict=True))) == len(kind)
    slots = [(k, row) for k, row in zip(kind.tolist(), made.tolist(), strict=True) if KINDS[k] == "slot"]
    assert len(slots) == sum(part.op in RECEIVES for stream in program.streams for part in instructions_of(stream))


def altered(program: Program, rank: int, stream: list[Unit] | Stream) -> Program:
    return program.with_streams((*program.streams[:rank], tuple(stream), *program.streams[rank + 1 :]))


def test_what_is_read_by_none_or_too_late_is_named() -> None:
    program = compiled("1f1b", 2, 3)
    first = list(program.streams[0])
    unsent = [unit for unit in first if unit.key != Key(Op.SEND_F, 0, 1)]
    with pytest.raises(ScheduleError, match=r"^rank 0: the result buffer of 0F1 is read by none "):
        prove_buffers(altered(program, 0, unsent))
    alone = compiled("gpipe", 1, 2)
    f, other, bw, *rest = alone.streams[0]
    with pytest.raises(ScheduleError, match=r"^rank 0: the saved buffer of 0F0 is read last by 0BW0 and free behind "):
        prove_buffers(altered(alone, 0, (bw, other, f, *rest)))
    turned = compiled("zb-v", 2, 4)  # the V's turn stays on its rank: to send it as well is to free it twice
    send = Instruction(Op.SEND_F, 1, 0, 0, waits=(Key(Op.F, 1, 0),))
    with pytest.raises(ScheduleError, match=r"^rank 1: the result buffer of 1F0 is read by none "):
        prove_buffers(altered(turned, 1, (*turned.streams[1], send)))
