"""Every result that another rank needs is sent and received once, and the receive does not disturb compute."""

from __future__ import annotations

from collections import Counter, defaultdict
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reachability_proof import partner
from schedule_sizes import allows

from pentad.schedules.catalogue import CATALOGUE, generate
from pentad.schedules.compiler import compile_program
from pentad.schedules.ir.errors import ScheduleError
from pentad.schedules.ir.instruction import COLLECTIVES, COMPUTE, RECEIVES, SENDS, Instruction, Key, Op
from pentad.schedules.ir.program import Program, index_of
from pentad.schedules.passes.transfers import add_transfers
from pentad.schedules.simulate.costs import Costs
from pentad.schedules.simulate.simulate import simulate

PROGRAMS = [(name, 4, 8) for name in CATALOGUE] + [(name, 3, 2) for name in CATALOGUE if allows(name, 3, 2)]
compiled = cache(compile_program)
both_ways = pytest.mark.parametrize("gated", [False, True], ids=["posted", "gated"])
of_all = pytest.mark.parametrize(("name", "ranks", "microbatches"), PROGRAMS)


def parts_of(program: Program, rank: int) -> list[Instruction]:
    return [part for action in program.streams[rank] for part in action.parts]


@pytest.mark.sampled(20)
@of_all
@both_ways
def test_every_send_meets_its_receive(name: str, ranks: int, microbatches: int, gated: bool) -> None:
    program = compiled(name, ranks, microbatches, gated=gated)
    sent, received = defaultdict(list), defaultdict(list)
    for rank in range(ranks):
        for part in parts_of(program, rank):
            if part.op in SENDS:
                sent[rank, part.peer, SENDS[part.op]].append(partner((rank, part.key), part)[1])
            elif part.op in RECEIVES:
                received[part.peer, rank, part.op].append(part.key)
    assert sent == received
    hops = Counter(kind for (_, _, kind), keys in sent.items() for _ in keys)
    home = program.compute_rank
    crossed = sum(
        home[s, mb] != home[s + 1, mb] for s in range(program.stages - 1) for mb in range(program.total_slices)
    )
    assert hops == Counter({kind: crossed for kind in RECEIVES if crossed})


@pytest.mark.sampled(23)
@of_all
@both_ways
def test_a_send_follows_its_result_and_a_receive_has_one_reader(
    name: str, ranks: int, microbatches: int, gated: bool
) -> None:
    program = compiled(name, ranks, microbatches, gated=gated)
    for stream in program.streams:
        position = index_of(stream)
        for action in stream:
            for part in action.parts:
                if part.op in SENDS:
                    made = part.waits[0]
                    assert made.op in ((Op.F,) if part.op is Op.SEND_F else (Op.B, Op.BW))
                    assert made[1:] == (part.stage, part.microbatch)
                    between = stream[position[made] + 1 : position[part.key]]
                    assert all(other.parts[0].op in SENDS for other in between)
                elif part.op in RECEIVES:
                    readers = [u for u in stream for p in u.parts if part.key in p.waits and p.op in COMPUTE]
                    assert len(readers) == 1


@of_all
@both_ways
def test_there_are_as_many_slots_as_tensors_held_at_once(name: str, ranks: int, microbatches: int, gated: bool) -> None:
    """A tensor is held from its receive to its last reader: B or BW of an activation, W or BW of a gradient."""
    program = compiled(name, ranks, microbatches, gated=gated)
    for rank, stream in enumerate(program.streams):
        position = index_of(stream)
        for kind, ends in ((Op.RECV_F, (Op.B, Op.BW)), (Op.RECV_B, (Op.W, Op.BW))):
            mine = [part for part in parts_of(program, rank) if part.op is kind]
            spans = [
                (position[part.key], max(position.get(Key(op, *part.key[1:]), -1) for op in ends)) for part in mine
            ]
            held = [sum(start <= at <= end for start, end in spans) for at in range(len(stream))]
            assert {part.slot for part in mine} == set(range(max(held)))


SECONDS = st.floats(0.5, 2)


@pytest.mark.sampled(10)
@of_all
@given(data=st.data())
@settings(max_examples=8)
def test_a_gated_receive_waits_for_its_sender_only_while_nothing_computes(
    name: str, ranks: int, microbatches: int, data: st.DataObject
) -> None:
    """A waiting receive would take part of the GPU from compute. So from the end of everything that it waits for on
    its own rank until its transfer starts, that rank computes nothing."""
    each = st.tuples(*[SECONDS] * generate(name, ranks, microbatches).stages)
    costs = Costs(data.draw(each), data.draw(each), data.draw(each))
    program = compile_program(name, ranks, microbatches, costs=costs, gated=True)
    spans = {(span.rank, span.name): span for span in simulate(program, costs).spans}
    for rank in range(ranks):
        busy = [span for span in spans.values() if span.rank == rank and span.lane == "compute"]
        for part in parts_of(program, rank):
            if part.op in RECEIVES:
                launched = max((spans[rank, str(key)].end for key in part.waits), default=0.0)
                started = spans[rank, str(part.key)].start
                assert not [span for span in busy if span.end > launched + 1e-9 and span.start < started - 1e-9]


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zb-h2", "dualpipe"])
def test_a_posted_receive_never_keeps_its_sender_waiting(name: str) -> None:
    """With the costs it was compiled for, its slot is granted by the time the result is ready (in an overlapped pair:
    both results)."""
    costs = Costs.uniform(4, 1.0, 1.25, 0.75)
    program = compile_program(name, 4, 12, costs=costs)
    spans = {(span.rank, span.name): span for span in simulate(program, costs).spans}
    for rank, stream in enumerate(program.streams):
        position = index_of(stream)
        for part in parts_of(program, rank):
            if part.op in SENDS:
                made = stream[position[part.waits[0]]].parts[-1]
                assert spans[rank, str(part.key)].start == spans[rank, str(made.key)].end


def test_an_order_that_cannot_run_is_refused_naming_where_it_stops() -> None:
    order = generate("1f1b", 2, 2)
    first = order.streams[0]
    with pytest.raises(ScheduleError, match=r"rank 0: 0BW0 waits for 1BW?0, which never runs before it") as caught:
        add_transfers(order.with_streams((first, order.streams[1][::-1])), Costs.uniform(2), gated=False)
    assert (caught.value.rank, caught.value.index) == (0, 2)


@pytest.mark.parametrize(("replicas", "name", "reduced"), [(1, "1f1b", 0), (2, "1f1b", 4), (1, "dualpipe", 8)])
def test_all_holders_of_a_stage_reduce_its_gradients_after_their_last_weight_gradient(
    replicas: int, name: str, reduced: int
) -> None:
    program = compile_program(name, 4, 8, replicas=replicas)
    found = 0
    for rank, stream in enumerate(program.streams):
        position = index_of(stream)
        for part in parts_of(program, rank):
            if part.op is Op.ALL_REDUCE:
                found += 1
                last = max(
                    (k for k in position if k.stage == part.stage and k.op in (Op.W, Op.BW)), key=position.__getitem__
                )
                assert part.waits == (last,)
                assert part.group == f"stage{part.stage}"
                assert rank in program.holders(part.stage)
    assert found == reduced


@of_all
def test_a_stream_ends_with_the_norm_of_all_ranks_and_the_step(name: str, ranks: int, microbatches: int) -> None:
    for stream in compiled(name, ranks, microbatches, replicas=2).streams:
        *_, norm, step = stream
        assert (str(norm.key), str(step)) == ("NORM", "STEP after NORM")
        assert norm.parts[0].group == "pp"
        reduces = [action.key for action in stream if action.parts[0].op in COLLECTIVES - {Op.NORM}]
        assert set(reduces) < set(norm.waits)
