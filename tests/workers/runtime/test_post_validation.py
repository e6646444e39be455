"""A step that runs ahead of its global norm: the same bits as one that waits, whatever the norm turns out to be."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from fleet import Poison
from plans import MODEL, plan_of
from post_validation_cases import agree
from sizes import allows

from pentad.schedules.catalogue import CATALOGUE
from pentad.schedules.compiler import compile_program
from pentad.schedules.ir.instruction import COMPUTE, RECEIVES, SENDS, Key, Op, units_of
from pentad.schedules.passes.validation import ROLLBACK, VALIDATE
from pentad.schedules.simulate.costs import Costs
from pentad.schedules.simulate.dependencies import ScheduleError
from pentad.schedules.simulate.simulate import simulate
from pentad.schedules.spec.model import Experts
from pentad.schedules.verify.check import check

CASES = [("1f1b", 1, 2, 3), ("zb-h2", 1, 4, 8), ("zb-h2", 2, 2, 4), ("zb-v", 1, 2, 5), ("dualpipe", 1, 4, 8)]
SLOW = [("gpipe", 2, 2, 3), ("zb-2p", 1, 4, 9), ("v-min", 1, 4, 8), ("dualpipe", 2, 2, 4), ("dualpipev", 1, 4, 9)]
SLOW += [("interleaved-zb", 1, 2, 4), ("zb-h2", 1, 1, 2), ("1f1b", 2, 1, 2)]
ALL = [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]


@pytest.mark.parametrize("clip", [1e6, 0.5, 0.01], ids=["never clipped", "at times", "always"])
@pytest.mark.parametrize(("name", "dp", "pp", "m"), ALL)
def test_a_step_ahead_of_its_norm_gives_the_bits_of_one_that_waits(fleet, corpus, name, dp, pp, m, clip):
    plan, other = (plan_of(name, dp, pp, m, corpus, "float32", clip=clip, validated=v) for v in (True, False))
    agree(fleet.run(plan, [(0, 4), (4, 1)]), fleet.run(other, [(0, 4), (4, 1)]))


AUXILIARY = replace(
    MODEL, experts=Experts(num_experts=4, top_k=2, intermediate_size=12, shared_intermediate_size=8, aux_loss_coef=0.1)
)
INNER = [
    ("zb-h2", {"tp": 2, "pp": 2}),
    pytest.param("dualpipe", {"tp": 2, "pp": 2}, marks=pytest.mark.slow),
    pytest.param("1f1b", {"tp": 4}, marks=pytest.mark.slow),
    pytest.param("zb-v", {"cp": 2, "pp": 2}, marks=pytest.mark.slow),
    pytest.param("1f1b", {"cp": 4}, marks=pytest.mark.slow),
    ("dualpipe", {"ep": 2, "pp": 2, "model": AUXILIARY}),
    pytest.param("zb-h2", {"ep": 2, "pp": 2, "model": AUXILIARY}, marks=pytest.mark.slow),
    pytest.param("1f1b", {"ep": 2, "tp": 2, "model": AUXILIARY}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize("clip", [pytest.param(1e6, marks=pytest.mark.slow), 0.5], ids=["never clipped", "at times"])
@pytest.mark.parametrize(("name", "axes"), INNER)
def test_ranks_that_share_layers_need_not_wait_for_the_norm_either(fleet, corpus, name, axes, clip):
    given = {"dp": 1, "pp": 1, "microbatches": 4, "data": corpus, "dtype": "float32", "clip": clip, **axes}
    plan, other = (plan_of(name, **given, validated=validated) for validated in (True, False))
    agree(fleet.run(plan, [(0, 4), (4, 1)]), fleet.run(other, [(0, 4), (4, 1)]))


@pytest.mark.parametrize("value", [math.inf, pytest.param(math.nan, marks=pytest.mark.slow), 1e3])
@pytest.mark.parametrize(
    ("name", "dp", "pp", "m"), [("zb-h2", 1, 4, 8), pytest.param("dualpipe", 1, 4, 8, marks=pytest.mark.slow)]
)
def test_a_step_whose_norm_is_wrong_is_taken_back_and_done_again(fleet, corpus, name, dp, pp, m, value):
    plan, other = (plan_of(name, dp, pp, m, corpus, "float32", clip=50.0, validated=v) for v in (True, False))
    poison = Poison(rank=1, step=1, value=value)
    ahead, barrier = (fleet.run(each, [(0, 4)], poison=poison) for each in (plan, other))
    agree(ahead, barrier)
    assert [r.skipped for r in ahead[0].results] == [False, not math.isfinite(value), False, False]
    assert not ahead[0].results[1].grad_norm <= 50


@pytest.mark.parametrize(
    ("name", "ranks", "m"),
    [(n, p, m) for n in CATALOGUE for p in (1, 2, 4, 8) for m in (3, p, 3 * p) if allows(n, p, m)],
)
@pytest.mark.parametrize("gated", [False, True])
def test_what_is_done_before_the_verdict_can_be_done_again(name, ranks, m, gated):
    """Both ends of a transfer or none, and no gradient."""
    program = compile_program(name, ranks, m, gated=gated, validated=True)
    sent, received = set(), set()
    for rank, stream in enumerate(program.streams):
        before = stream[: program.positions[rank][VALIDATE]]
        for part in units_of(before):
            assert part.op in (Op.F, Op.SEND_F, Op.RECV_F)
            if part.op in SENDS:
                sent.add((rank, part.peer, part.stage + 1, part.microbatch))
            if part.op in RECEIVES:
                received.add((part.peer, rank, part.stage, part.microbatch))
        rest = [part.op for part in units_of(stream[len(before) :])]
        assert rest[:2] == [Op.VALIDATE, Op.ROLLBACK]
        assert rest[-2:] == [Op.NORM, Op.STEP]
    assert sent == received


@pytest.mark.parametrize(("ranks", "m"), [(2, 4), (4, 8), (8, 24)])
def test_zb_h2_loses_nothing_between_steps(ranks, m):
    """What the papers count as its bubble, `longest`, is what a step then takes (arXiv 2401.10241, section 4)."""
    program = compile_program("zb-h2", ranks, m, validated=True)
    timeline = simulate(program, Costs.uniform(ranks))
    assert timeline.longest == pytest.approx(3 * m)
    ends = {span.rank: span.end for span in timeline.spans if span.op == "STEP"}
    starts = {rank: min(s.start for s in timeline.compute if s.rank == rank) for rank in range(ranks)}
    assert max(end - starts[rank] for rank, end in ends.items()) == pytest.approx(timeline.longest)


def mutated(program, rank, change):
    streams = list(program.streams)
    streams[rank] = tuple(change(list(streams[rank])))
    return program.with_streams(tuple(streams))


def without(key):
    return lambda stream: [unit for unit in stream if unit.key != key]


def moved(key, by):
    def change(stream):
        at = next(i for i, unit in enumerate(stream) if unit.key == key)
        unit = stream.pop(at)
        stream.insert(at + by, unit)
        return stream

    return change


def aimed(key, **fields):
    return lambda stream: [unit._replace(**fields) if unit.key == key else unit for unit in stream]


NORM, STEP = Key(Op.NORM, -1, -1), Key(Op.STEP, -1, -1)
WRONG = {
    "no VALIDATE": (1, without(VALIDATE), "VALIDATE"),
    "no ROLLBACK": (1, without(ROLLBACK), "rank 1 has no ROLLBACK"),
    "a backward before": (0, lambda stream: moved(VALIDATE, 6)(moved(ROLLBACK, 6)(stream)), "VALIDATE"),
    "a forward between": (1, moved(VALIDATE, -1), "ROLLBACK"),
    "a receive behind, its send before": (1, lambda s: moved(VALIDATE, -2)(moved(ROLLBACK, -2)(s)), "VALIDATE"),
    "the norm of another rank": (2, aimed(NORM, peer=0), "its peer is 0: expected 1"),
    "the verdict of another rank": (2, aimed(VALIDATE, peer=1), "its peer is 1: expected 3"),
    "a norm for all": (2, aimed(NORM, peer=-1, group="pp"), "NORM"),
    "a step before its last gradient": (1, moved(STEP, -4), "STEP"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_program_that_could_not_begin_again_is_refused(case):
    rank, change, words = WRONG[case]
    program = compile_program("zb-h2", 4, 8, validated=True)
    with pytest.raises(ScheduleError) as caught:
        check(mutated(program, rank, change))
    assert words in str(caught.value)


def test_the_program_survives_its_text_and_its_table():
    program = compile_program("dualpipe", 4, 8, replicas=2, validated=True)
    again = type(program).from_bytes(program.to_bytes())
    assert again == program
    assert again.hash == program.hash != compile_program("dualpipe", 4, 8, replicas=2).hash
    assert {p.op for s in again.streams for p in units_of(s)} >= COMPUTE - {Op.W} | {Op.VALIDATE, Op.ROLLBACK}
    assert replace(program, name="other").hash == program.hash
