"""A sent result is read by a copy until its receiver has it; only what comes after that in every order of events may
take its memory."""

from __future__ import annotations

import pytest
from dependency_graph import Node, build, ordered

from pentad.schedules.catalogue import CATALOGUE
from pentad.schedules.compiler import compile_program
from pentad.schedules.ir.instruction import SENDS, Key
from pentad.schedules.passes.send_lifetimes import ended_sends


@pytest.mark.sampled(12)
@pytest.mark.parametrize("gated", [False, True], ids=["posted", "gated"])
@pytest.mark.parametrize("name", CATALOGUE)
def test_the_sends_before_an_action_in_every_order_have_ended(name: str, gated: bool) -> None:
    program = compile_program(name, 4, 8, gated=gated)
    graph = build(program)
    ancestors = [0] * len(graph.members)  # a bit for each event
    for event in ordered(graph):
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
