"""A flipped bit in one rank is found, and the right rank named; a check without one changes no bit of the run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from bit_flips import flip_bit
from plans import SHALLOW, plan_of
from rank_checks import assert_a_check_changes_nothing, verdict_after
from small_models import MOE

from pentad.orchestrator.recovery.bit_flips import Verdict
from pentad.schedules.spec.lora import LoraSpec
from pentad.schedules.spec.plan import Plan
from pentad.schedules.spec.schedule_spec import MemoryOptions
from pentad.workers.integrity.digest import ODD, PIECE, digest

pytestmark = pytest.mark.timeout(150)
slow = pytest.mark.slow
STEPS, LORA = 4, LoraSpec(2, 4.0, ("q_proj", "v_proj"))
PLANS: dict[str, Any] = {
    "ZeRO-3": ("1f1b", 2, 2, 4, {"memory_options": MemoryOptions(zero=3)}),
}
MORE: dict[str, Any] = {
    "dp2 tp2": ("1f1b", 2, 1, 4, {"tp": 2}),
    "dp2 pp2": ("1f1b", 2, 2, 4, {}),
    "ZeRO-1": ("1f1b", 4, 1, 2, {"memory_options": MemoryOptions(zero=1)}),
    "dp4": ("1f1b", 4, 1, 2, {}),
    "ep2 pp2": ("1f1b", 1, 2, 4, {"ep": 2, "model": replace(MOE, layers=4)}),
    "dualpipe": ("dualpipe", 1, 4, 8, {}),
    "zb-h2, updates taken back": ("zb-h2", 2, 2, 4, {"clip": 0.01, "post_validation": True}),
    "slices": ("seq-1f1b", 2, 2, 4, {"slices": 2}),
    "dp2 cp2": ("1f1b", 2, 1, 4, {"cp": 2}),
    "recompute, units": ("1f1b", 2, 2, 4, {"recompute": "full", "unit_layers": 1}),
    "ZeRO-2, units": ("zb-v", 2, 2, 5, {"memory_options": MemoryOptions(zero=2)}),
    "LoRA, ZeRO-2": ("1f1b", 2, 2, 4, {"lora": LORA, "memory_options": MemoryOptions(zero=2)}),
    "experts with LoRA, ZeRO-3": (
        "1f1b",
        2,
        1,
        2,
        {"model": replace(MOE, layers=2), "lora": LORA, "memory_options": MemoryOptions(zero=3)},
    ),
    "optimizer on the host": ("1f1b", 2, 2, 4, {"host_optimizer": True}),
    "bfloat16": ("1f1b", 2, 2, 4, {"dtype": "bfloat16"}),
}


def plan_for(case: str, corpus: str) -> Plan:
    name, dp, pp, m, more = (PLANS | MORE)[case]
    return plan_of(name, dp, pp, m, corpus, **{"dtype": "float32", "model": SHALLOW} | more)


@pytest.mark.parametrize("case", [*PLANS, *(pytest.param(case, marks=slow) for case in MORE)])
def test_ranks_without_a_fault_agree_and_a_check_changes_no_bit(workers, corpus, case):
    assert_a_check_changes_nothing(workers, plan_for(case, corpus), STEPS)


def test_frozen_experts_without_adapters_are_gathered_where_ranks_copy(workers, corpus):
    plan = plan_for("experts with LoRA, ZeRO-3", corpus)
    assert_a_check_changes_nothing(workers, replace(plan, transport="peer", hosts=(0, 0)), STEPS)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("case", "rank", "where", "expected"),
    [
        ("dp2 pp2", 3, "master", Verdict("data", (2, 3), "model.", 1, certain=False)),
        pytest.param("dp2 pp2", 0, "m", Verdict("data", (0, 1), "optimizer.m.", 1, certain=False), marks=slow),
        pytest.param("dp2 pp2", 0, "v", Verdict("data", (0, 1), "optimizer.v.", 1, certain=False), marks=slow),
        pytest.param("dp2 tp2", 1, "matrix v", Verdict("data", (1, 3), "optimizer.v.", 1, certain=False), marks=slow),
        ("dp2 tp2", 1, "m", Verdict("data", (1,), "optimizer.m.", 1)),
        pytest.param("dp4", 2, "matrix master", Verdict("data", (2,), "model.", 1), marks=slow),
        pytest.param("bfloat16", 1, "compute", Verdict("data", (0, 1), "model.", 1, certain=False), marks=slow),
        pytest.param("bfloat16", 1, "master", Verdict("data", (0, 1), "model.", 1, certain=False), marks=slow),
        pytest.param("dp2 cp2", 1, "master", Verdict("data", (1,), "model.", 1), marks=slow),
        pytest.param("dualpipe", 0, "master", Verdict("data", (0, 3), "model.", 1, certain=False), marks=slow),
    ],
)
def test_a_flipped_bit_in_the_state_of_one_rank_is_found(workers, corpus, case, rank, where, expected):
    """If only two ranks hold the same, nothing says which of them is right. Norms are on all tp ranks."""
    verdict = verdict_after(workers, plan_for(case, corpus), rank, where)
    assert verdict is not None and verdict.what.startswith(expected.what)
    assert verdict == expected._replace(what=verdict.what)


@pytest.mark.parametrize(
    ("case", "rank", "where", "kind", "ranks"),
    [
        ("dp2 pp2", 1, "F once", "hardware", (1,)),
        pytest.param("dp2 pp2", 2, "B once", "hardware", (2,), marks=slow),
        pytest.param("dp2 pp2", 2, "W once", "hardware", (2,), marks=slow),
        pytest.param("dp2 tp2", 3, "W once", "hardware", (3,), marks=slow),
        pytest.param("dp2 pp2", 2, "W", "software", (2, 3), marks=slow),
        pytest.param("ZeRO-1", 1, "W", "hardware", (1,), marks=slow),
        pytest.param("ZeRO-3", 3, "W once", "hardware", (3,), marks=slow),
        pytest.param("ZeRO-3", 1, "F", "software", (0, 1), marks=slow),
    ],
)
def test_a_flipped_bit_in_a_result_of_one_rank_is_found(workers, corpus, case, rank, where, kind, ranks):
    """A wrong result that occurs once names the rank; one that always occurs does so only if a majority disagrees."""
    verdict = verdict_after(workers, plan_for(case, corpus), rank, where)
    assert verdict is not None
    assert (verdict.kind, verdict.ranks) == (kind, ranks)


@slow
@pytest.mark.parametrize("case", ["ZeRO-1", "ZeRO-3"])
def test_a_shard_that_no_other_rank_holds_is_not_compared(workers, corpus, case):
    assert verdict_after(workers, plan_for(case, corpus), 1, "m") is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_every_bit_of_every_element_counts(dtype):
    values = torch.randn(2 * PIECE + 5).to(dtype)
    known = digest(values)
    for element in (0, 1, PIECE - 1, PIECE, 2 * PIECE + 4):
        for bit in (0, 7, 15):
            changed = values.clone()
            flip_bit(changed, element, bit)
            assert digest(changed) != known
    swapped = values.clone()
    swapped[[3, PIECE + 3]] = values[[PIECE + 3, 3]]
    assert digest(swapped) != known


def test_a_digest_is_the_sum_that_it_says_it_is():
    values = torch.arange(-3, 2 * PIECE, 7, dtype=torch.int32)
    expected = sum(value * (2 * at + 1) * ODD for at, value in enumerate(values[:1000].tolist()))
    assert int(digest(values[:1000])) % 2**64 == expected % 2**64
    assert int(digest(values)) % 2**64 == sum(v * (2 * at + 1) * ODD for at, v in enumerate(values.tolist())) % 2**64
