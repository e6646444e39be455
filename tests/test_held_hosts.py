"""A host may be held at whatever it computes until its GPU is through with all it was given, and every program goes on.

A GPU's driver holds it so where a kernel is loaded or memory is given back. (Reductions hold nobody: a group has met
before the first step, see workers/groups.py.)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sizes import allows

from pentad.schedules.catalogue import CATALOGUE
from pentad.schedules.compiler import compile_program
from pentad.schedules.costs import Costs
from pentad.schedules.instruction import COLLECTIVES, RECEIVES, SENDS, Instruction, Op, Unit, parse
from pentad.schedules.program import Stream
from pentad.schedules.shape import Savings

Transfer = tuple[Op, int, int, int]  # the k-th of a kind from a rank to another


def channel(rank: int, part: Instruction) -> tuple[Op, int, int]:
    return (part.op, rank, part.peer) if part.op in SENDS else (RECEIVES[part.op], part.peer, rank)


def held_for_ever(streams: Sequence[Stream]) -> list[Unit]:
    """Where hosts stand in the end that issue transfers, and at anything else wait until both ends of all transfers
    that they have issued are there."""
    at, mine = [0] * len(streams), [set[Transfer]() for _ in streams]
    there: Counter[Transfer] = Counter()  # ends that have been issued
    count: Counter[tuple[int, Op, int]] = Counter()
    moved = True
    while moved:
        moved = False
        for rank, stream in enumerate(streams):
            while at[rank] < len(stream):
                part = stream[at[rank]].parts[0]
                if part.op in SENDS or part.op in RECEIVES:
                    transfer = (*channel(rank, part), count[rank, part.op, part.peer])
                    count[rank, part.op, part.peer] += 1
                    there[transfer] += 1
                    mine[rank].add(transfer)
                elif part.op not in COLLECTIVES and any(there[transfer] < 2 for transfer in mine[rank]):
                    break
                at[rank] += 1
                moved = True
    return [stream[k] for stream, k in zip(streams, at, strict=True) if k < len(stream)]


COST = st.floats(0.05, 20)


@pytest.mark.parametrize("name", CATALOGUE)
@settings(max_examples=60)
@given(st.data())
def test_hosts_that_are_held_at_what_they_compute_get_to_the_end(name: str, data: st.DataObject) -> None:
    sizes = [(pp, m) for pp in (1, 2, 3, 4, 6, 8) for m in (pp, pp + 1, 2 * pp, 4 * pp) if allows(name, pp, m)]
    ranks, microbatches = data.draw(st.sampled_from(sizes))
    stages = compile_program(name, ranks, microbatches).stages
    each = st.lists(COST, min_size=stages, max_size=stages).map(tuple)
    costs = Costs(data.draw(each), data.draw(each), data.draw(each), transfer=data.draw(st.floats(0, 20)))
    savings = data.draw(st.sampled_from([Savings(), Savings(buckets=(3,) * stages), Savings(zero=3)]))
    gated, validated = data.draw(st.booleans()), data.draw(st.booleans())
    program = compile_program(
        name, ranks, microbatches, costs=costs, gated=gated, replicas=2, validated=validated, savings=savings
    )
    assert not held_for_ever(program.streams)


def test_hosts_that_grant_behind_what_they_compute_are_held_for_ever() -> None:
    first = "0F0 | 0SEND_F0>1 after 0F0 | 0F1 | 1RECV_F2<1@0 | 1F2 after 1RECV_F2"
    second = "0F2 | 0SEND_F2>0 after 0F2 | 0F3 | 1RECV_F0<0@0 | 1F0 after 1RECV_F0"
    streams = tuple(tuple(map(parse, text.split(" | "))) for text in (first, second))
    assert list(map(str, held_for_ever(streams))) == ["0F1", "0F3"]
