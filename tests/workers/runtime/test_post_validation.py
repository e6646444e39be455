"""Post-validation: an optimistic step has the same bits as one with a barrier, whatever its norm turns out to be."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from bits import assert_same_runs
from fleet import BadGradient, Fleet
from plans import MODEL, plan_of
from schedule_sizes import allows

from pentad.schedules.catalogue import CATALOGUE
from pentad.schedules.compiler import compile_program
from pentad.schedules.ir.errors import ScheduleError
from pentad.schedules.ir.instruction import COMPUTE, RECEIVES, SENDS, Key, Op, instructions_of
from pentad.schedules.passes.post_validation import ROLLBACK, VALIDATE
from pentad.schedules.simulate.costs import Costs
from pentad.schedules.simulate.read_costs import read_costs
from pentad.schedules.simulate.simulate import simulate
from pentad.schedules.spec.model import Experts
from pentad.schedules.spec.schedule_spec import MemoryOptions
from pentad.schedules.verify.check import check

slow = pytest.mark.slow
CLIPS = {"never clipped": 1e6, "sometimes": 0.5, "always": 0.01}
USUAL = [("1f1b", 1, 2, 3), ("dualpipe", 1, 4, 8)]
SLOW = [("zb-h2", 2, 2, 4)]
SLOW += [("gpipe", 2, 2, 3), ("zb-2p", 1, 4, 9), ("v-min", 1, 4, 8), ("dualpipe", 2, 2, 4), ("dualpipev", 1, 4, 9)]
SLOW += [("zb-h2", 1, 4, 8), ("zb-v", 1, 2, 5)]
SLOW += [("interleaved-zb", 1, 2, 4), ("zb-h2", 1, 1, 2), ("1f1b", 2, 1, 2)]


ZERO = [
    ("zb-h2", 2, 2, 4, 1),
    ("zb-h2", 2, 2, 4, 3),
    ("zb-v", 2, 2, 5, 2),
    ("dualpipe", 1, 4, 8, 3),
    ("1f1b", 4, 1, 2, 1),
]


def cases() -> list:
    """Schedules by how often steps are clipped; those of USUAL always run with steps that are sometimes clipped."""
    found = [(*case, 0, clip) for case in USUAL + SLOW for clip in CLIPS]
    found += [(*case, clip) for case in ZERO for clip in ("never clipped", "sometimes")]
    always = [(*case, 0, clip) for case in USUAL for clip in CLIPS if clip == "sometimes"]
    always += [(*case, "sometimes") for case in ZERO[1:2]]
    return [pytest.param(*case, marks=[] if case in always else [slow]) for case in found]


def run_both(fleet: Fleet, calls: list, bad_gradient: BadGradient | None = None, **plan: Any) -> Iterator[list]:
    """The outcomes of a plan with post-validation, and of the same plan with a barrier."""
    for post_validation in (True, False):
        made = plan_of(**plan, dtype="float32", post_validation=post_validation)
        yield fleet.run(made, calls, bad_gradient=bad_gradient)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("name", "dp", "pp", "m", "zero", "clip"), cases())
def test_an_optimistic_step_has_the_bits_of_one_with_a_barrier(fleet, corpus, name, dp, pp, m, zero, clip):
    plan = {"dp": dp, "pp": pp, "microbatches": m, "data": corpus, "memory_options": MemoryOptions(zero=zero)}
    assert_same_runs(*run_both(fleet, [(0, 4), (4, 1)], name=name, clip=CLIPS[clip], **plan))


@pytest.mark.parametrize(("clip", "restarts"), [("never clipped", 0), ("always", 1)])
def test_after_a_clipped_step_the_next_ones_wait_for_their_norm(fleet, corpus, clip, restarts):
    """So of several clipped steps in a row only the first is rolled back."""
    plan = plan_of("zb-h2", 1, 2, 4, corpus, dtype="float32", post_validation=True, clip=CLIPS[clip])
    outcomes = fleet.run(plan, [(0, 3, True), (3, 2)])
    assert [outcome.restarts for outcome in outcomes] == [restarts, restarts]


SHALLOW = replace(MODEL, layers=4)
EXPERTS = Experts(num_experts=4, top_k=2, intermediate_size=12, shared_intermediate_size=8, aux_loss_coef=0.1)
WITH_AUX_LOSS = replace(SHALLOW, experts=EXPERTS)
SHARED_LAYERS = [
    pytest.param("zb-h2", {"tp": 2, "pp": 2}, marks=slow),
    pytest.param("dualpipe", {"tp": 2, "pp": 2}, marks=slow),
    pytest.param("1f1b", {"tp": 4}, marks=slow),
    pytest.param("zb-v", {"cp": 2, "pp": 2}, marks=slow),
    pytest.param("1f1b", {"cp": 4}, marks=slow),
    ("dualpipe", {"ep": 2, "pp": 2, "model": WITH_AUX_LOSS}),
    pytest.param("zb-h2", {"ep": 2, "pp": 2, "model": WITH_AUX_LOSS}, marks=slow),
    pytest.param("1f1b", {"ep": 2, "tp": 2, "model": WITH_AUX_LOSS}, marks=slow),
]


@pytest.mark.slow
@pytest.mark.parametrize("clip", [pytest.param("never clipped", marks=slow), "sometimes"])
@pytest.mark.parametrize(("name", "axes"), SHARED_LAYERS)
def test_optimistic_steps_on_meshes_with_shared_layers(fleet, corpus, name, axes, clip):
    plan = {"dp": 1, "pp": 1, "microbatches": 4, "data": corpus, "model": SHALLOW, **axes}
    assert_same_runs(*run_both(fleet, [(0, 4), (4, 1)], name=name, clip=CLIPS[clip], **plan))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("value", [math.inf, pytest.param(math.nan, marks=slow), 1e3])
@pytest.mark.parametrize(
    ("name", "dp", "pp", "m"),
    [("zb-h2", 1, 2, 4), *(pytest.param(name, 1, 4, 8, marks=slow) for name in ("zb-h2", "dualpipe"))],
)
def test_a_step_with_a_bad_norm_is_rolled_back_and_repeated(fleet, corpus, name, dp, pp, m, value):
    plan = {"name": name, "dp": dp, "pp": pp, "microbatches": m, "data": corpus, "clip": 50.0}
    optimistic, barrier = run_both(fleet, [(0, 4)], BadGradient(rank=1, step=1, value=value), **plan)
    assert_same_runs(optimistic, barrier)
    assert [r.skipped for r in optimistic[0].results] == [False, not math.isfinite(value), False, False]
    assert not optimistic[0].results[1].grad_norm <= 50


@pytest.mark.sampled(10)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("name", CATALOGUE)
def test_a_stream_before_validation_can_be_repeated(name, gated):
    """It contains both ends of a transfer or neither, and no backward."""
    for ranks, m in {(p, m) for p in (1, 2, 4, 8) for m in (3, p, 3 * p) if allows(name, p, m)}:
        assert_repeatable(name, ranks, m, gated)


def assert_repeatable(name, ranks, m, gated):
    program = compile_program(name, ranks, m, gated=gated, post_validation=True)
    sent, received = set(), set()
    for rank, stream in enumerate(program.streams):
        before = stream[: program.positions[rank][VALIDATE]]
        for part in instructions_of(before):
            assert part.op in (Op.F, Op.SEND_F, Op.RECV_F)
            if part.op in SENDS:
                sent.add((rank, part.peer, part.stage + 1, part.microbatch))
            if part.op in RECEIVES:
                received.add((part.peer, rank, part.stage, part.microbatch))
        rest = [part.op for part in instructions_of(stream[len(before) :])]
        assert rest[:2] == [Op.VALIDATE, Op.ROLLBACK]
        assert rest[-2:] == [Op.NORM, Op.STEP]
    assert sent == received


@pytest.mark.parametrize(("ranks", "m"), [(2, 4), (4, 8), (8, 24)])
def test_zb_h2_loses_nothing_between_steps(ranks, m):
    """A step takes `longest`, from which the paper computes the bubble (arXiv 2401.10241, section 4)."""
    program = compile_program("zb-h2", ranks, m, post_validation=True)
    timeline = simulate(program, Costs.uniform(ranks))
    assert timeline.longest == pytest.approx(3 * m)
    ends = {span.rank: span.end for span in timeline.spans if span.op == "STEP"}
    starts = {rank: min(s.start for s in timeline.compute if s.rank == rank) for rank in range(ranks)}
    assert max(end - starts[rank] for rank, end in ends.items()) == pytest.approx(timeline.longest)


def test_a_step_waits_for_the_update_of_the_one_before():
    """VALIDATE updates master weights between the forwards of the warm-up and the first backward."""
    program = compile_program("1f1b", 1, 4, post_validation=True)
    costs = Costs.uniform(1)
    later = simulate(program, replace(costs, validate_step=0.5))
    assert later.makespan == pytest.approx(simulate(program, costs).makespan + 0.5)
    found = read_costs(program, later)
    assert found is not None and found.validate_step == pytest.approx(0.5)


def mutated(program, rank, change):
    streams = list(program.streams)
    streams[rank] = tuple(change(list(streams[rank])))
    return program.with_streams(tuple(streams))


def without(key):
    return lambda stream: [action for action in stream if action.key != key]


def moved(key, by):
    def change(stream):
        at = next(i for i, action in enumerate(stream) if action.key == key)
        action = stream.pop(at)
        stream.insert(at + by, action)
        return stream

    return change


def with_fields(key, **fields):
    return lambda stream: [action._replace(**fields) if action.key == key else action for action in stream]


NORM, STEP = Key(Op.NORM, -1, -1), Key(Op.STEP, -1, -1)
BROKEN = {
    "no VALIDATE": (1, without(VALIDATE), "VALIDATE"),
    "no ROLLBACK": (1, without(ROLLBACK), "rank 1 has no ROLLBACK"),
    "a backward before": (0, lambda stream: moved(VALIDATE, 6)(moved(ROLLBACK, 6)(stream)), "VALIDATE"),
    "a forward between": (1, moved(VALIDATE, -1), "ROLLBACK"),
    "a receive after, its send before": (1, lambda s: moved(VALIDATE, -2)(moved(ROLLBACK, -2)(s)), "VALIDATE"),
    "the norm of another rank": (2, with_fields(NORM, peer=0), "its peer is 0: expected 1"),
    "the validation of another rank": (2, with_fields(VALIDATE, peer=1), "its peer is 1: expected 3"),
    "a norm for all": (2, with_fields(NORM, peer=-1, group="pp"), "NORM"),
    "a step before its last gradient": (1, moved(STEP, -4), "STEP"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_program_that_cannot_restart_a_step_is_refused(case):
    rank, change, words = BROKEN[case]
    program = compile_program("zb-h2", 4, 8, post_validation=True)
    with pytest.raises(ScheduleError) as caught:
        check(mutated(program, rank, change))
    assert words in str(caught.value)


def test_a_program_survives_serialization():
    program = compile_program("dualpipe", 4, 8, replicas=2, post_validation=True)
    again = type(program).from_bytes(program.to_bytes())
    assert again == program
    assert again.hash == program.hash != compile_program("dualpipe", 4, 8, replicas=2).hash
    assert {p.op for s in again.streams for p in instructions_of(s)} >= COMPUTE - {Op.W} | {Op.VALIDATE, Op.ROLLBACK}
    assert replace(program, name="other").hash == program.hash
