"""No program hangs even if a host blocks at any compute instruction until its GPU has done all that was launched.

CUDA may block a host at a kernel's first use (programming guide, lazy loading) and when the stack grows
(cuCtxSetLimit). Reductions block no host: before the first step, process groups are connected and their kernels are
launched once.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from reachability_proof import Place, partner
from schedule_sizes import NAMES, allows

from pentad.schedules.compiler import compile_program
from pentad.schedules.ir.instruction import COLLECTIVES, SENDS, Action, Op, parse
from pentad.schedules.ir.program import Stream
from pentad.schedules.simulate.costs import Costs
from pentad.schedules.spec.schedule_spec import MemoryOptions


def blocked_forever(streams: Sequence[Stream], free: frozenset[Op] = COLLECTIVES) -> list[Action]:
    """Actions that hosts never get past. A host launches transfers and ops in `free` at once; before any other it waits
    until the other ends of all transfers that it has launched are launched, too."""
    parts = [((rank, action.key), action.parts[0]) for rank, stream in enumerate(streams) for action in stream]
    ends = {place: partner(place, part) for place, part in parts if part.op in SENDS}
    ends |= {there: here for here, there in ends.items()}
    at, issued, expected = [0] * len(streams), set[Place](), [set[Place]() for _ in streams]
    moved = True
    while moved:
        moved = False
        for rank, stream in enumerate(streams):
            while at[rank] < len(stream):
                place = rank, stream[at[rank]].key
                if place in ends:
                    issued.add(place)
                    expected[rank].add(ends[place])
                elif place[1].op not in free and not expected[rank] <= issued:
                    break
                at[rank] += 1
                moved = True
    return [stream[k] for stream, k in zip(streams, at, strict=True) if k < len(stream)]


COST = st.floats(0.05, 20)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", NAMES)
@given(st.data())
def test_hosts_that_block_at_compute_reach_the_end(name: str, data: st.DataObject) -> None:
    sizes = [(pp, m) for pp in (1, 2, 3, 4, 6, 8) for m in (pp, pp + 1, 2 * pp, 4 * pp) if allows(name, pp, m)]
    ranks, microbatches = data.draw(st.sampled_from(sizes))
    stages = compile_program(name, ranks, microbatches).stages
    options = [MemoryOptions(), MemoryOptions(units=(3,) * stages), MemoryOptions(zero=3)]
    memory_options = data.draw(st.sampled_from(options))
    units = sum(memory_options.units) or stages
    each = st.lists(COST, min_size=units, max_size=units).map(tuple)
    costs = Costs(data.draw(each), data.draw(each), data.draw(each), transfer=data.draw(st.floats(0, 20)))
    gated, post_validation = data.draw(st.booleans()), data.draw(st.booleans())
    program = compile_program(
        name,
        ranks,
        microbatches,
        costs=costs,
        gated=gated,
        replicas=2,
        post_validation=post_validation,
        memory_options=memory_options,
    )
    assert not blocked_forever(program.streams)


def test_hosts_that_receive_too_late_block_forever() -> None:
    first = "0F0 | 0SEND_F0>1 after 0F0 | 0F1 | 1RECV_F2<1@0 | 1F2 after 1RECV_F2"
    second = "0F2 | 0SEND_F2>0 after 0F2 | 0F3 | 1RECV_F0<0@0 | 1F0 after 1RECV_F0"
    streams = tuple(tuple(map(parse, text.split(" | "))) for text in (first, second))
    assert list(map(str, blocked_forever(streams))) == ["0F1", "0F3"]


def test_reductions_must_not_block_hosts() -> None:
    """Adjacent mirrored ranks reduce before they receive what the other one has sent: this hang was seen on GPUs."""
    streams = compile_program("dualpipe", 2, 8).streams
    assert not blocked_forever(streams)
    assert [action.key.op for action in blocked_forever(streams, free=frozenset())] == [Op.ALL_REDUCE, Op.ALL_REDUCE]
