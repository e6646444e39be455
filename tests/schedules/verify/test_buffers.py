"""Every buffer is filled, read and freed, in this order; lifetimes are those that a walk along the stream finds."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import numpy as np
import pytest

from pentad.schedules.catalogue import CATALOGUE
from pentad.schedules.compiler import compile_program
from pentad.schedules.ir.errors import ScheduleError
from pentad.schedules.ir.instruction import RECEIVES, SENDS, Action, Instruction, Key, Op, instructions_of
from pentad.schedules.ir.program import Program, Stream
from pentad.schedules.simulate.memory import peak_activations
from pentad.schedules.verify.buffers import KINDS, buffers, prove_buffers

compiled = cache(compile_program)
PROGRAMS = [(name, 4, 8, gated) for name in CATALOGUE for gated in (False, True)]
all_programs = pytest.mark.parametrize(("name", "ranks", "microbatches", "gated"), PROGRAMS)


def lifetimes(program: Program, stream: Stream) -> Iterator[tuple[str, Key, Key | None]]:
    """(kind, filled by, freed after; None: at the end of the step), found by a walk along the stream of a rank."""
    here = {part.key for part in instructions_of(stream)}
    sent: dict[str, Key] = {}  # lane -> the result that it sends
    slots: dict[tuple[Op, int], Key] = {}
    for part in instructions_of(stream):
        if part.op in SENDS:
            if part.lane in sent:
                yield "result", sent[part.lane], part.key
            sent[part.lane] = part.waits[0]
        elif part.op in RECEIVES:
            if (part.op, part.slot) in slots:
                yield "slot", slots[part.op, part.slot], part.key
            slots[part.op, part.slot] = part.key
        elif part.op is Op.W:
            yield "deferred", part.key._replace(op=Op.B), part.key
        elif part.op in (Op.B, Op.BW):
            yield "saved", part.key._replace(op=Op.F), part.key
        if part.op in (Op.F, Op.B, Op.BW):  # reads the result of another stage of this rank
            stage = part.stage - 1 if part.op is Op.F else part.stage + 1
            for op in (Op.F,) if part.op is Op.F else (Op.B, Op.BW):
                if (key := Key(op, stage, part.microbatch)) in here:
                    yield "result", key, part.key
    yield from (("result", key, None) for key in sent.values())
    yield from (("slot", key, None) for key in slots.values())


@pytest.mark.sampled(19)
@all_programs
def test_lifetimes_are_what_a_walk_along_the_stream_finds(
    name: str, ranks: int, microbatches: int, gated: bool
) -> None:
    program = compiled(name, ranks, microbatches, gated=gated, replicas=2)
    kind, filled, _, freed = buffers(program)
    columns = program.columns
    found: list[set[tuple[str, Key, Key | None]]] = [set() for _ in range(ranks)]
    for k, (fill, free) in enumerate(zip(filled.tolist(), freed.tolist(), strict=True)):
        end = columns.key(free) if free >= 0 else None
        found[columns.rank[fill]].add((KINDS[kind[k]], columns.key(fill), end))
    assert sum(map(len, found)) == len(kind)
    assert found == [set(lifetimes(program, stream)) for stream in program.streams]


@pytest.mark.sampled(19)
@all_programs
def test_saved_and_deferred_buffers_add_up_to_the_peak_activations(
    name: str, ranks: int, microbatches: int, gated: bool
) -> None:
    program = compiled(name, ranks, microbatches, gated=gated)
    kind, filled, _, freed = buffers(program)
    change = np.zeros(program.columns.rows)  # in half activations of a chunk
    for name_of_kind, size in (("saved", 2), ("deferred", 1)):
        rows = kind == KINDS.index(name_of_kind)
        np.add.at(change, filled[rows], size)
        np.add.at(change, freed[rows], -size)
    by_rank = np.split(change, program.columns.rank_offsets[1:-1])
    halves = 2 * program.chunks * program.slices
    assert [max(np.cumsum(part)) / halves for part in by_rank] == peak_activations(program)


@all_programs
def test_a_buffer_is_read_after_it_is_filled_and_before_it_is_freed(
    name: str, ranks: int, microbatches: int, gated: bool
) -> None:
    program = compiled(name, ranks, microbatches, gated=gated)
    prove_buffers(program)
    _, filled, last_read, freed = buffers(program)
    end = np.where(freed < 0, program.columns.rows, freed)
    assert (filled < last_read).all() and (last_read <= end).all()


def altered(program: Program, rank: int, stream: list[Action] | Stream) -> Program:
    streams = list(program.streams)
    streams[rank] = tuple(stream)
    return program.with_streams(streams)


def test_a_buffer_that_is_never_read_or_read_too_early_is_named() -> None:
    program = compiled("1f1b", 2, 3)
    unsent = [action for action in program.streams[0] if action.key != Key(Op.SEND_F, 0, 1)]
    with pytest.raises(ScheduleError, match=r"^rank 0: the result buffer of 0F1 is never read "):
        prove_buffers(altered(program, 0, unsent))
    single = compiled("gpipe", 1, 2)
    f, other, bw, *rest = single.streams[0]
    with pytest.raises(ScheduleError, match=r"^rank 0: the saved buffer of 0F0 is last read by 0BW0 and freed after "):
        prove_buffers(altered(single, 0, (bw, other, f, *rest)))
    turned = compiled("zb-v", 2, 4)  # rank 1 holds both stages at the turn of the V: a send would free the result twice
    send = Instruction(Op.SEND_F, 1, 0, 0, waits=(Key(Op.F, 1, 0),))
    with pytest.raises(ScheduleError, match=r"^rank 1: the result buffer of 1F0 is never read "):
        prove_buffers(altered(turned, 1, (*turned.streams[1], send)))
