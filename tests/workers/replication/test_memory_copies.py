"""A run that loses ranks whose state no replica and no checkpoint has continues from copies in the memory of other
ranks, with the bits of a run without a fault."""

from __future__ import annotations

from collections import ChainMap
from dataclasses import replace
from typing import Any

import pytest
import torch
from fleet import assemble
from memory_copies import Copies, assert_ends_the_same, assert_recovers_from_a_copy, lose, replaced
from plans import SHALLOW, plan_of
from small_models import MOE
from worker_processes import call_all, ranks_of, start_generation, start_run, uninterrupted

from pentad.schedules.spec.optimizer import SpikeSpec
from pentad.schedules.spec.plan import Plan
from pentad.schedules.spec.schedule_spec import MemoryOptions
from pentad.workers.abort import Aborted
from pentad.workers.checkpoint.checkpoint import Unreadable

pytestmark = pytest.mark.timeout(150)
slow = pytest.mark.slow
STEPS, COPIED = 10, 4
ZERO = [MemoryOptions(zero=zero) for zero in range(4)]
CASES: dict[str, Any] = {
    "ZeRO-3": ("1f1b", 2, 2, 4, {"memory_options": ZERO[3], "model": replace(SHALLOW, layers=2)}),
    "ZeRO-1": ("1f1b", 4, 1, 2, {"memory_options": ZERO[1]}),
    "ZeRO-2": ("zb-v", 2, 2, 5, {"memory_options": ZERO[2]}),
    "tp2": ("1f1b", 1, 2, 4, {"tp": 2}),
    "cp2": ("1f1b", 1, 2, 4, {"cp": 2}),
    "cp2, ZeRO-3": ("1f1b", 1, 2, 4, {"cp": 2, "memory_options": ZERO[3]}),
    "ep2": ("1f1b", 1, 2, 4, {"ep": 2, "model": replace(MOE, layers=4)}),
    "pp4, zb-h2": ("zb-h2", 1, 4, 8, {"post_validation": True, "clip": 0.5}),
    "dualpipe": ("dualpipe", 1, 4, 8, {}),
}

DEFAULT = "ZeRO-3"


def plan_for(case: str, corpus: str) -> Plan:
    name, dp, pp, m, more = CASES[case]
    plan = plan_of(name, dp, pp, m, corpus, "float32", **{"model": SHALLOW} | more)
    return replace(plan, replicate_every=2)


@pytest.mark.parametrize("case", [pytest.param(case, marks=() if case == DEFAULT else slow) for case in CASES])
@pytest.mark.parametrize("lost", [(1,), pytest.param((0, 1), marks=slow)])
def test_ranks_lost_without_a_checkpoint_are_replaced_from_their_holders_to_the_same_bits(workers, corpus, case, lost):
    """The copy is made while later steps run, the last of which is lost with the ranks. Ranks 0 and 1 are on one
    node."""
    plan = plan_for(case, corpus)
    with ranks_of(workers, plan.mesh.size) as ranks:
        assert_recovers_from_a_copy(ranks, plan, "AABB", COPIED, STEPS, *lost)


@slow
@pytest.mark.parametrize("phase", ["snapshot", "prepared"])
def test_a_rank_lost_while_a_copy_is_made_leaves_the_one_before(workers, corpus, phase):
    """It dies before its part is complete, or after all parts are in place, when nobody knows yet that they are."""
    plan = plan_for("ZeRO-3", corpus)
    with ranks_of(workers, plan.mesh.size) as ranks:
        expected = uninterrupted(ranks, plan, STEPS)
        start_run(ranks, plan)
        copies = Copies(ranks, "AABB")
        call_all(ranks, "run", 0, 2, True)
        copies.make(1, 2)
        if phase == "prepared":
            call_all(ranks, "run", 2, 2, True)
            for worker, number in copies.submit(1, 4):
                worker.answer(number)
            lose(ranks, 2)
        else:  # the end of the open step, which completes the snapshot, never comes
            call_all(ranks, "run", 2, 2, True)
            asked = copies.submit(1, 6)
            lose(ranks, 2)
            for worker, number in [each for rank, each in enumerate(asked) if rank != 2]:
                with pytest.raises(Aborted):
                    worker.answer(number)
        assert replaced(ranks, plan, copies, 2, 2) == 2
        copies.make(2, 2)
        assert_ends_the_same(ranks, expected, 2, STEPS)


@slow
def test_a_rank_and_its_holder_lost_at_once_leave_no_copy_but_two_others_do(workers, corpus):
    plan = plan_for("ZeRO-3", corpus)
    with ranks_of(workers, plan.mesh.size) as ranks:
        start_run(ranks, plan)
        copies = Copies(ranks, "AABB")
        call_all(ranks, "run", 0, 2)
        copies.make(1, 2)
        assert copies.holders == (2, 3, 0, 1)
        assert copies.newest({0, 1}) is not None and copies.newest({0, 3}) is not None
        assert copies.newest({0, 2}) is None and copies.newest({1, 3}) is None
        call_all(ranks, "close")


@slow
def test_a_copy_has_the_window_of_spikes_and_moves_to_another_mesh(workers, corpus):
    plan = replace(plan_for("ZeRO-3", corpus), spikes=SpikeSpec(threshold=0.5, window=2, min_steps=1))
    start_run(workers, plan)
    copies = Copies(workers, "AABB")
    call_all(workers, "run", 0, COPIED)
    copies.make(1, COPIED)
    parts = call_all(workers, "state")
    source = copies.newest(set())
    call_all(workers, "close")
    smaller = replace(plan_of("1f1b", 1, 2, 8, corpus, "float32", model=plan.model), spikes=plan.spikes)
    assert source is not None
    nobody = source._replace(parts=tuple(each._replace(address="127.0.0.1:1") for each in source.parts))
    start_generation(workers[:2], smaller, 2, nobody)
    with pytest.raises(Unreadable, match="Connection refused"):
        call_all(workers[:2], "restore_copy", nobody)
    call_all(workers[:2], "restore_copy", source)
    state = dict(ChainMap(*call_all(workers[:2], "state")))
    call_all(workers[:2], "close")
    at_rest = assemble(parts, state)
    assert state.keys() == at_rest.keys() and all(torch.equal(state[name], value) for name, value in at_rest.items())
