"""Inserted instructions are where they were inserted, and everything else is unchanged."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pentad.schedules.compiler import compile_program
from pentad.schedules.ir.columns import pack
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.ir.instruction import Action, Instruction, Key, Op, instructions_of
from pentad.schedules.ir.program import Program
from pentad.schedules.ir.rewrite import insert

compiled = cache(compile_program)
PROGRAMS = [("1f1b", 2, 3), ("zb-v", 2, 4), ("dualpipe", 2, 4), ("gpipe", 1, 2)]
ADDED = st.builds(
    Instruction,
    st.sampled_from([Op.ALL_GATHER, Op.FREE, Op.RECOMPUTE, Op.OFFLOAD]),
    st.integers(0, 3),
    st.integers(-1, 9),
    peer=st.just(-1),
    slot=st.integers(-1, 3),
    group=st.sampled_from(["", "a", "stage0", "zz"]),
    waits=st.lists(st.builds(Key, st.sampled_from(Op), st.integers(-1, 3), st.integers(-1, 3)), max_size=2).map(tuple),
)


@pytest.mark.parametrize(("name", "ranks", "microbatches"), PROGRAMS)
@given(data=st.data())
def test_additions_go_before_their_positions_in_the_given_order(
    name: str, ranks: int, microbatches: int, data: st.DataObject
) -> None:
    program = compiled(name, ranks, microbatches, replicas=2)
    expected = [list(stream) for stream in program.streams]
    rank = st.integers(0, ranks - 1)
    places = data.draw(st.lists(st.tuples(rank, st.integers(0, 40), ADDED), max_size=8))
    additions = [(r, min(at, len(program.streams[r])), part) for r, at, part in places]
    for r in range(ranks):
        mine = [(at, part) for where, at, part in additions if where == r]
        for at in range(len(expected[r]), -1, -1):
            expected[r][at:at] = [part for place, part in mine if place == at]
    found = insert(program, additions)
    assert found.streams == tuple(map(tuple, expected))
    assert found == program.with_streams(tuple(map(tuple, expected)))
    assert found.hash == program.with_streams(tuple(map(tuple, expected))).hash


@pytest.mark.parametrize(("name", "ranks", "microbatches"), PROGRAMS)
def test_new_waits_come_after_existing_ones(name: str, ranks: int, microbatches: int) -> None:
    program = compiled(name, ranks, microbatches, replicas=2)
    step, more = Key(Op.STEP, -1, -1), (Key(Op.F, 0, 0), Key(Op.W, 1, 9))
    found = insert(program, (), [(rank, step, key) for rank in range(ranks) for key in more])
    for rank in range(ranks):
        parts = {part.key: part for part in instructions_of(program.streams[rank])}
        for part in instructions_of(found.streams[rank]):
            assert part == parts[part.key]._replace(waits=parts[part.key].waits + more * (part.key == step))


def test_a_wait_of_an_instruction_that_does_not_exist_is_refused() -> None:
    with pytest.raises(KeyError, match="rank 1 has no 0F0"):
        insert(compiled("1f1b", 2, 3), (), [(1, Key(Op.F, 0, 0), Key(Op.F, 0, 1))])


@pytest.mark.parametrize(("name", "ranks", "microbatches"), PROGRAMS)
def test_packed_streams_decode_to_what_they_were_packed_from(name: str, ranks: int, microbatches: int) -> None:
    program = compiled(name, ranks, microbatches, gated=True, replicas=2)
    streams: tuple[tuple[Action, ...], ...] = tuple(program.streams)
    again = pack(streams)
    assert again == streams == program.streams
    assert (again[-1], again[0], len(again)) == (streams[-1], streams[0], len(streams))
    assert hash(again) == hash(streams)
    assert Program(program.name, streams, program.placement, microbatches, program.chunks) == program


def test_a_number_beyond_32_bits_is_refused() -> None:
    with pytest.raises(PentadError, match=r"^an instruction holds the number 2147483648: expected at most 2147483647$"):
        Program("wide", ((Instruction(Op.F, 0, 2**31),),), ((0,),), 1)
