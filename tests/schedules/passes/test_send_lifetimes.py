"""A copy reads a sent result until its receiver has it; only what comes after that in every order of events may reuse
its memory."""

from __future__ import annotations

import pytest
from dependency_graph import Node, build, ordered

from pentad.schedules.catalogue import CATALOGUE
from pentad.schedules.compiler import compile_program
from pentad.schedules.ir.instruction import SENDS, Key, Op, parse
from pentad.schedules.ir.program import Program
from pentad.schedules.passes.send_lifetimes import ended_sends


@pytest.mark.sampled(12)
@pytest.mark.parametrize("gated", [False, True], ids=["posted", "gated"])
@pytest.mark.parametrize("name", CATALOGUE)
def test_the_sends_before_an_action_in_every_order_have_ended(name: str, gated: bool) -> None:
    check(compile_program(name, 4, 8, gated=gated))


def test_mirror_ranks_that_gather_say_nothing_of_each_other() -> None:
    """Rank 1 gathers after it has received from rank 0, but rank 0 may gather before the SEND has ended."""
    streams = (
        ("0F0", "0SEND_F0>1 after 0F0", "0ALL_GATHER0#stage0", "0F1 after 0ALL_GATHER0"),
        ("1RECV_F0<0@0", "0ALL_GATHER0#stage0 after 1RECV_F0"),
    )
    program = Program("mirrors", tuple(tuple(map(parse, stream)) for stream in streams), ((0,), (1, 0)), 2)
    assert ended_sends(program, 0) == {}


def check(program: Program) -> None:
    graph = build(program)
    ancestors = [0] * len(graph.members)  # a bit for each event
    for event in ordered(graph):
        rank, at = graph.members[event][0]
        if program.streams[rank][at].parts[0].op is Op.ALL_GATHER:
            continue
        for each in graph.before[event]:
            ancestors[event] |= ancestors[each] | 1 << each
    for rank, stream in enumerate(program.streams):
        found, known = ended_sends(program, rank), set[Key]()
        sends = {
            action.key: graph.event[Node(rank, at)] for at, action in enumerate(stream) if action.parts[0].op in SENDS
        }
        for at, action in enumerate(stream):
            if action.lane != "compute":
                assert action.key not in found
                continue
            known |= set(found.get(action.key, ()))
            event = graph.event[Node(rank, at)]
            assert known == {key for key, sent in sends.items() if ancestors[event] >> sent & 1}
