"""The memory-saving passes keep their promises in every program, and `check` refuses programs that break them."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from schedule_sizes import TYPICAL, allows

from pentad.schedules.catalogue import CATALOGUE
from pentad.schedules.compiler import compile_program
from pentad.schedules.ir.errors import PentadError, ScheduleError
from pentad.schedules.ir.instruction import COMPUTE, Instruction, Key, Op, instructions_of
from pentad.schedules.ir.program import Program
from pentad.schedules.passes.zero_buffers import gradient_pool, gradient_sums, gradient_waits, stages_sharing_memory
from pentad.schedules.simulate.costs import Costs
from pentad.schedules.simulate.memory import SAVED_CHANGE, peak_activations
from pentad.schedules.simulate.simulate import simulate
from pentad.schedules.spec.schedule_spec import MemoryOptions, ScheduleOptions
from pentad.schedules.verify.check import check

COPIES = (Op.OFFLOAD, Op.RELOAD)
READERS = (Op.F, Op.B, Op.BW, Op.RECOMPUTE)
SIZES = [(n, p, m) for n in CATALOGUE for p, m in ((1, 3), (2, 5), (4, 8), (4, 12)) if allows(n, p, m)]
CHUNKED = [("interleaved", 2, 4, 4), ("interleaved", 1, 3, 4), ("looped-bfs", 2, 6, 3), ("interleaved-zb", 4, 8, 3)]


def drop(program: Program, rank: int, key: Key) -> Program:
    streams = list(program.streams)
    streams[rank] = tuple(
        u._replace(waits=tuple(w for w in u.waits if w != key)) if isinstance(u, Instruction) else u
        for u in streams[rank]
        if u.key != key
    )
    return program.with_streams(tuple(streams))


def cases(sizes: list[Any]) -> list[Any]:
    """Test cases, each beginning with a schedule and a size. The largest are slow; so are large ones of schedules that
    are not TYPICAL."""

    def is_slow(name: str, *size: Any) -> bool:
        return size[:2] == (4, 12) or (size[:2] == (4, 8) and name not in TYPICAL)

    return [pytest.param(*each, marks=[pytest.mark.slow] * is_slow(*each)) for each in sizes]


def compiled(
    name: str, p: int, m: int, memory_options: MemoryOptions, chunks: int | None = None, post_validation: bool = False
) -> Program:
    options = ScheduleOptions(chunks)
    return compile_program(
        name, p, m, replicas=2, memory_options=memory_options, options=options, post_validation=post_validation
    )


def most_gathered(program: Program) -> int:
    """The most stages gathered at once; asserts that every stage that is read is gathered."""
    most, made_in_w = 0, {program.stages - 1} if program.logits_in_w else set()
    for stream in program.streams:
        gathered: set[int] = set()
        for part in instructions_of(stream):
            if part.op is Op.ALL_GATHER:
                assert part.stage not in gathered
                gathered.add(part.stage)
            elif part.op is Op.FREE:
                gathered.remove(part.stage)
            elif part.op in READERS or (part.op is Op.W and part.stage in made_in_w):
                assert part.stage in gathered
            most = max(most, len(gathered))
    return most


@pytest.mark.sampled(54)
@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("post_validation", [False, True])
@pytest.mark.parametrize(("name", "p", "m"), cases(SIZES))
def test_every_holder_gathers_a_stage_once_a_step_and_scatters_its_gradients(name, p, m, zero, post_validation):
    program = compiled(name, p, m, MemoryOptions(zero=zero), post_validation=post_validation)
    assert most_gathered(program) == max(map(len, program.placement))
    for stages, stream in zip(program.placement, program.streams, strict=True):
        count = Counter((part.op, part.stage) for part in instructions_of(stream))
        for stage in stages:
            assert count[Op.ALL_GATHER, stage] == count[Op.REDUCE_SCATTER, stage] == 1
            assert count[Op.FREE, stage] == (zero == 3)
            assert not count[Op.ALL_REDUCE, stage]


@pytest.mark.sampled(26)
@pytest.mark.parametrize("zero", [0, 2])
@pytest.mark.parametrize(("name", "p", "m", "chunks"), cases([*((*size, None) for size in SIZES), *CHUNKED]))
def test_gradients_are_reduced_as_soon_as_all_holders_of_a_stage_are_done(name, p, m, chunks, zero):
    """Once each, and in the same order on all ranks. Stages with one holder per pipeline are reduced right after their
    last W."""
    program = compiled(name, p, m, MemoryOptions(zero=zero), chunks)
    order: set[tuple[int, int]] = set()
    for stream in program.streams:
        parts = [part for part in instructions_of(stream) if part.op in (*COMPUTE, Op.ALL_REDUCE, Op.REDUCE_SCATTER)]
        at = {part.key: place for place, part in enumerate(parts)}
        reduced = [part for part in parts if part.op not in COMPUTE]
        last = {part.stage: part.key for part in parts if part.op in (Op.W, Op.BW)}
        assert {part.stage for part in reduced} == set(last)
        for part in reduced:
            assert part.waits == (last[part.stage],)
            if len(program.holders(part.stage)) == 1:
                between = parts[at[last[part.stage]] + 1 : at[part.key]]
                assert not COMPUTE.intersection(each.op for each in between)
        for before, after in pairwise(reduced):
            order.add((before.stage, after.stage))
    assert not any((after, before) in order for before, after in order)


def test_stages_that_finish_one_after_another_share_two_gradient_buffers():
    """One is reduced while the other accumulates, so the memory of ZeRO 2 does not grow with the stages."""
    for chunks in (2, 4, 8):
        program = compiled("looped-bfs", 1, 2, MemoryOptions(zero=2), chunks)
        assert gradient_pool(program, 0).elements == (2,)
        costs = Costs(*((1.0,) * chunks,) * 3, reduce=(3.0,) * chunks)  # longer than the backward of a microbatch
        assert simulate(program, costs).makespan == 2 * 3 * chunks  # nothing waits
        sums = gradient_sums(program, 0)
        assert gradient_waits(sums, stages_sharing_memory(program, sums)).shape == (2, chunks - 2)


@pytest.mark.sampled(12)
@pytest.mark.parametrize("prefetch", [0, 1, 3])
@pytest.mark.parametrize("gathered", [1, 2, 3])
@pytest.mark.parametrize(("name", "p", "m", "chunks"), CHUNKED)
def test_no_more_stages_are_gathered_than_allowed(name, p, m, chunks, gathered, prefetch):
    program = compiled(name, p, m, MemoryOptions(zero=3, max_gathered=gathered, prefetch=prefetch), chunks)
    assert most_gathered(program) == gathered
    simulate(program, Costs.uniform(program.stages))


@pytest.mark.parametrize(("name", "p", "m", "chunks"), [("interleaved-zb", 4, 8, 3), ("zb-v", 2, 5, None)])
def test_w_that_makes_logits_has_the_weights_of_the_last_stage(name, p, m, chunks):
    plain, program = (
        compiled(name, p, m, MemoryOptions(zero=3, max_gathered=1, prefetch=0, logits_in_w=each), chunks)
        for each in (False, True)
    )
    assert most_gathered(program) == 1
    assert Program.from_bytes(program.to_bytes()).logits_in_w
    assert program.hash != replace(program, logits_in_w=False).hash
    with pytest.raises(ScheduleError, match=f"reads stage {program.stages - 1}, not gathered"):
        check(replace(plain, logits_in_w=True), replicas=2)


def test_more_room_means_fewer_gathers_and_prefetching_hides_them():
    costs = Costs(*((1.0,) * 8,) * 3, reduce=(1.6,) * 8)
    found = {}
    for gathered, prefetch in ((1, 0), (2, 0), (2, 1), (3, 0), (3, 1), (4, 0)):
        memory_options = MemoryOptions(zero=3, max_gathered=gathered, prefetch=prefetch)
        program = compiled("interleaved", 2, 4, memory_options, 4)
        gathers = sum(part.op is Op.ALL_GATHER for stream in program.streams for part in instructions_of(stream))
        found[gathered, prefetch] = (gathers, simulate(program, costs).makespan)
    assert found[4, 0][0] == 8 < found[3, 0][0] < found[2, 0][0] < found[1, 0][0]
    assert found[4, 0][1] == found[3, 1][1] == found[2, 1][1] < found[3, 0][1] < found[2, 0][1] < found[1, 0][1]


@pytest.mark.parametrize(("name", "p", "m"), cases(SIZES))
def test_every_microbatch_of_a_stage_is_recomputed_once(name, p, m):
    stages = frozenset(range(0, p, 2))
    program = compiled(name, p, m, MemoryOptions(recompute=stages))
    again = Counter(
        (part.stage, part.microbatch)
        for stream in program.streams
        for part in instructions_of(stream)
        if part.op is Op.RECOMPUTE
    )
    assert again == {(stage, mb): 1 for stage in stages for mb in range(program.total_slices)}


def test_recompute_fills_the_wait_for_the_gradient():
    """Some of the recomputation happens in the bubble, while a rank waits for a gradient."""
    plain, costs = compile_program("gpipe", 4, 4), Costs.uniform(4)
    program = compile_program("gpipe", 4, 4, memory_options=MemoryOptions(recompute=frozenset({0, 1, 2})))
    assert simulate(program, costs).makespan < simulate(plain, costs).makespan + 4


def most_resident(program: Program) -> float:
    most = 0.0
    for stream in program.streams:
        resident, taken = 0.0, set[Key]()
        for part in instructions_of(stream):
            offloads = (
                {key for key in part.waits if key.op is Op.OFFLOAD} - taken if part.op is not Op.RELOAD else set()
            )
            taken |= offloads
            resident += SAVED_CHANGE.get(part.op, 0.0) * (part.op is not Op.OFFLOAD) - len(offloads)
            most = max(most, resident)
    return most / (program.chunks * program.slices)


@pytest.mark.sampled(19)
@pytest.mark.parametrize("limit", [2.0, 2.5, 4.0])
@pytest.mark.parametrize(("name", "p", "m"), cases([size for size in SIZES if size[0] != "dualpipe"]))
def test_no_more_activations_are_resident_than_allowed(name, p, m, limit):
    plain = compiled(name, p, m, MemoryOptions())
    try:
        program = compiled(name, p, m, MemoryOptions(max_resident=limit))
    except PentadError:  # B frees half of the activations; the half that W needs cannot be offloaded
        assert Op.W in {part.op for stream in plain.streams for part in instructions_of(stream)}
        return
    assert most_resident(program) == max(peak_activations(program)) <= limit
    moved = Counter(part.op for stream in program.streams for part in instructions_of(stream))
    assert moved[Op.OFFLOAD] == moved[Op.RELOAD]
    assert bool(moved[Op.OFFLOAD]) == (most_resident(plain) > limit)
    simulate(program, Costs.uniform(program.stages))


@pytest.mark.parametrize(
    ("units", "prefetch"), [(1, 1), *(pytest.param(3, far, marks=pytest.mark.slow) for far in (1, 2, 5))]
)
@pytest.mark.parametrize(("name", "p", "m"), cases(SIZES))
def test_units_go_to_the_host_beside_later_compute_and_come_back_in_time(name, p, m, units, prefetch):
    """Each at most once: those with enough compute actions between forward and backward for both copies."""
    stages = compile_program(name, p, m).stages
    every = frozenset(range(units * stages))
    options = MemoryOptions(offload=every, offload_prefetch=prefetch, units=(units,) * stages)
    program = compiled(name, p, m, options)
    for stream in program.streams:
        number, place = -1, dict[Key, int]()  # the number of the latest compute action
        for action in stream:
            number += action.parts[0].op in COMPUTE
            place |= {part.key: number for part in action.parts}
        moved = {key[1:] for key in place if key.op is Op.OFFLOAD}
        assert moved == {key[1:] for key in place if key.op is Op.RELOAD}
        assert all(place[Key(Op.OFFLOAD, *cell)] == place[Key(Op.F, *cell)] for cell in moved)
        for key, at in place.items():
            if key.op in (Op.B, Op.BW) and at - place[Key(Op.F, *key[1:])] > 2 + 2 * prefetch:
                assert key[1:] in moved
            if key.op is Op.RELOAD:
                backward = next(place[each] for op in (Op.B, Op.BW) if (each := Key(op, *key[1:])) in place)
                assert backward - at == 1 + prefetch  # `prefetch` compute actions lie in between
    simulate(program, replace(Costs.uniform(program.stages), offload=(0.5,) * program.stages))


@pytest.mark.parametrize("units", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("name", "p", "m", "chunks"), [*CHUNKED, ("interleaved-zb", 4, 8, 4), ("zb-v", 4, 8, 2)])
def test_units_that_recompute_go_to_the_host_in_any_order_of_chunks(name, p, m, chunks, units):
    """A W runs at its own place, however early its unit was recomputed."""
    every = frozenset(range(units * p * chunks))
    options = MemoryOptions(recompute=every, offload=every, units=(units,) * p * chunks)
    program = compiled(name, p, m, options, chunks if "chunks" in CATALOGUE[name].accepts else None)
    assert any(part.op is Op.OFFLOAD for stream in program.streams for part in instructions_of(stream))


def test_slow_copies_hold_compute_up_and_fast_ones_do_not():
    plain = compile_program("gpipe", 2, 4, memory_options=MemoryOptions(units=(4, 4)))
    program = compile_program("gpipe", 2, 4, memory_options=MemoryOptions(units=(4, 4), offload=frozenset(range(8))))
    times = [
        simulate(each, replace(Costs.uniform(8), offload=(seconds,) * 8)).makespan
        for each, seconds in ((plain, 0.0), (program, 0.9), (program, 3.0))
    ]
    assert times[0] == times[1] < times[2]


def test_all_memory_passes_together_are_proven():
    memory_options = MemoryOptions(zero=3, max_gathered=2, recompute=frozenset({0, 5}), max_resident=2.0)
    for post_validation in (False, True):
        program = compiled("interleaved", 4, 8, memory_options, 3, post_validation=post_validation)
        assert max(peak_activations(program)) <= 2
        assert {part.op for stream in program.streams for part in instructions_of(stream)} >= {
            Op.ALL_GATHER, Op.FREE, Op.REDUCE_SCATTER, Op.RECOMPUTE, Op.OFFLOAD, Op.RELOAD,
        }  # fmt: skip
        assert Program.from_bytes(program.to_bytes()) == program


BAD = [
    ("gpipe", 2, 4, MemoryOptions(zero=4), "zero.stage is 4: expected 0 to 3"),
    (
        *("gpipe", 2, 4, MemoryOptions(zero=3, max_gathered=0)),
        "zero.max_gathered is 0: expected at least 1, because one action on rank 0 of schedule gpipe reads that many "
        "stages",
    ),
    (
        *("dualpipe", 2, 4, MemoryOptions(zero=3, max_gathered=1)),
        "zero.max_gathered is 1: expected at least 2, because one action on rank 0 of schedule dualpipe reads that "
        "many stages",
    ),
    (
        *("gpipe", 2, 4, MemoryOptions(recompute=frozenset({7}))),
        "memory.recompute_stages has stage 7: expected stages from 0 to 1",
    ),
    (
        *("gpipe", 2, 4, MemoryOptions(max_resident=0.5)),
        "memory.max_resident_microbatches is 0.5: expected at least 2, which rank 0 saves at once",
    ),
]


@pytest.mark.parametrize(("name", "p", "m", "memory_options", "sentence"), BAD)
def test_invalid_options_are_refused_in_one_sentence(name, p, m, memory_options, sentence):
    with pytest.raises(PentadError) as caught:
        compile_program(name, p, m, memory_options=memory_options)
    assert str(caught.value) == sentence


def change(program: Program, rank: int, key: Key, **fields) -> Program:
    streams = list(program.streams)
    streams[rank] = tuple(u._replace(**fields) if u.key == key else u for u in streams[rank])
    return program.with_streams(tuple(streams))


@pytest.mark.parametrize("op", [Op.ALL_GATHER, Op.FREE, Op.OFFLOAD, Op.RELOAD, Op.REDUCE_SCATTER])
def test_a_program_without_one_of_these_instructions_is_refused(op):
    program = compiled("interleaved", 2, 6, MemoryOptions(zero=3, max_gathered=1, max_resident=2.0), 3)
    check(program, replicas=2)
    for rank, stream in enumerate(program.streams):
        for key in [part.key for part in instructions_of(stream) if part.op is op]:
            with pytest.raises(ScheduleError):
                check(drop(program, rank, key), replicas=2)


OFFLOADS = (
    MemoryOptions(zero=3, max_gathered=1, max_resident=2.0),
    MemoryOptions(offload=frozenset({0, 2}), units=(2,) * 6),
)


@pytest.mark.parametrize("memory_options", OFFLOADS)
@pytest.mark.parametrize("op", [Op.ALL_GATHER, Op.OFFLOAD, Op.RELOAD, Op.F, Op.BW, Op.RECOMPUTE])
def test_a_program_without_one_of_these_waits_is_refused(op, memory_options):
    program = compiled("interleaved", 2, 6, memory_options, 3)
    for rank, stream in enumerate(program.streams):
        for part in instructions_of(stream):
            for key in part.waits:
                if part.op is op and (key.op in (Op.ALL_GATHER, Op.FREE, Op.F, *COPIES) or op in COPIES):
                    fewer = tuple(other for other in part.waits if other != key)
                    with pytest.raises(ScheduleError):
                        check(change(program, rank, part.key, waits=fewer), replicas=2)


EVERY = MemoryOptions(zero=2, reduce="microbatch")


@pytest.mark.sampled(17)
@pytest.mark.parametrize("units", [pytest.param(1, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize(("name", "p", "m"), [size for size in SIZES if size[1] != 4])
def test_every_microbatch_is_reduced_once_after_its_last_w(name: str, p: int, m: int, units: int) -> None:
    """Two gradient buffers suffice, unless the slices of a microbatch make all units of a rank accumulate at once."""
    program = compiled(name, p, m, EVERY._replace(units=(units,) * compile_program(name, p, m).stages))
    for rank, stream in enumerate(program.streams):
        parts = list(instructions_of(stream))
        weights = [part for part in parts if part.op in (Op.W, Op.BW)]
        first = {part.stage: part.microbatch // program.slices for part in reversed(weights)}  # mirrors run half
        last = {(part.stage, part.microbatch // program.slices - first[part.stage]): part.key for part in weights}
        reduced = [part for part in parts if part.op is Op.REDUCE_SCATTER]
        assert [part.key[1:] for part in reduced] == list(dict.fromkeys(part.key[1:] for part in reduced))
        assert {(part.stage, part.microbatch): part.waits for part in reduced} == {at: (w,) for at, w in last.items()}
        held = len(program.placement[rank])
        most = held if program.slices > 1 else min(2, held)
        assert gradient_pool(program, rank).elements == (most,)


def test_only_shards_are_reduced_every_microbatch() -> None:
    expected = r"^zero\.reduce is microbatch with zero\.stage = 1: expected zero\.stage 2 or 3$"
    with pytest.raises(PentadError, match=expected):
        compiled("1f1b", 2, 4, EVERY._replace(zero=1))


@pytest.mark.parametrize(("name", "units", "expected"), [("1f1b", 2, -1), ("1f1b", 3, 0), ("dualpipe", 3, 0)])
def test_by_default_every_microbatch_is_reduced_where_more_than_two_buffers_would_be_needed(
    name: str, units: int, expected: int
) -> None:
    program = compiled(name, 2, 4, MemoryOptions(zero=2, units=(units,) * 2, reduce=None))
    reductions = [part for part in instructions_of(program.streams[0]) if part.op is Op.REDUCE_SCATTER]
    assert min(part.microbatch for part in reductions) == expected
