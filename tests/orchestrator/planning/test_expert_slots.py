"""Slots for experts' tokens: which plans have them, how many, and what the planner counts for them."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import pytest
from paths import ROOT

from pentad.orchestrator.config.config import load
from pentad.orchestrator.planning.comm_volume import comm_volume
from pentad.orchestrator.planning.estimate import memory, simulated_seconds
from pentad.orchestrator.planning.planning import make_plan
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.spec.model import Experts
from pentad.schedules.spec.plan import Plan
from pentad.schedules.spec.row_slots import expert_slots, routed_share

CONFIG = ROOT / "deploy/jobs/qwen3-30b-a3b.yaml"


def plan_of(*overrides: str, ep: int = 32, device: str = "cuda") -> Plan:
    """A plan of Qwen3 30B-A3B with two microbatches of one sequence of 4,096 tokens."""
    words = [f"mesh.ep={ep}", f"batch.global_batch_size={2 * ep}", "memory.recompute=full", "model.layers=8"]
    return make_plan(load(Path(CONFIG), [*words, *overrides]), device)


@pytest.mark.parametrize(
    ("ep", "more", "device", "slots"),
    [
        # 1.5 x 4,096 x 0.2302, rounded up to a multiple of 16; two ranks of the group share a host
        (32, ["mesh.tp=4"], "cuda", 1424),
        (32, [], "cuda", 0),  # eight share a host, and 8 x 1,424 is more than all tokens
        (128, [], "cuda", 384),
        (8, ["mesh.ep_capacity=1.5"], "cuda", 4096),
        (8, [], "cuda", 0),
        (32, ["mesh.ep_capacity=1"], "cuda", 944),
        (32, ["mesh.tp=4", "mesh.ep_capacity=0"], "cuda", 0),
        (32, ["mesh.tp=4"], "cpu", 0),
        (32, ["mesh.tp=4", "memory.offload_fraction=0.5"], "cuda", 0),
    ],
)
def test_ranks_have_slots_by_default_where_fewer_rows_then_leave_hosts(ep, more, device, slots):
    words = ["cluster.device=cpu"] if device == "cpu" else []
    assert plan_of(*more, *words, ep=ep, device=device).expert_slots == slots


@pytest.mark.parametrize(
    ("num_experts", "top_k", "ep", "groups", "topk_groups"),
    [
        (12, 3, 4, 1, 1),
        (8, 2, 4, 1, 1),
        (4, 4, 2, 1, 1),
        (12, 3, 6, 4, 2),
        (12, 4, 2, 4, 3),
        (12, 3, 3, 2, 1),
        (12, 2, 4, 6, 4),
    ],
)
def test_the_share_of_tokens_that_a_rank_gets_is_that_of_all_choices(num_experts, top_k, ep, groups, topk_groups):
    """Even if a rank has experts of several groups, or parts of groups."""
    experts, size = Experts(num_experts, top_k, 1, num_groups=groups, topk_groups=topk_groups), num_experts // groups
    visits = [
        len({each * ep // num_experts for each in chosen}) / ep
        for some in combinations(range(groups), topk_groups)
        for chosen in combinations([each for each in range(num_experts) if each // size in some], top_k)
    ]
    assert routed_share(experts, ep) == pytest.approx(sum(visits) / len(visits))
    assert expert_slots(1.0, 100, 3.0) == 100  # never more than all tokens


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["schedule.post_validation=true", "mesh.pp=2", "schedule.name=zb-h2"], "schedule.post_validation = true"),
        (["memory.offload_fraction=0.5"], "memory.offload_fraction or"),
    ],
)
def test_slots_are_refused_where_a_step_is_not_run_again(words, reason):
    with pytest.raises(PentadError, match=rf"^mesh.ep_capacity is 2: expected 0 or null with {reason}"):
        plan_of("mesh.ep_capacity=2", "model.experts.aux_loss_coef=0", *words)


def test_slots_save_time_bytes_and_memory():
    """All slots are sent, used or not: 31 x 1,424 rows instead of 31 x 4,096."""
    few, all_tokens = plan_of("mesh.tp=4"), plan_of("mesh.tp=4", "mesh.ep_capacity=0")
    assert simulated_seconds(few) < 0.8 * simulated_seconds(all_tokens)
    assert _sent_to_experts(few) / _sent_to_experts(all_tokens) == pytest.approx(1424 / 4096, rel=0.01)
    assert memory(few, 0)["total"] < memory(all_tokens, 0)["total"]


def _sent_to_experts(plan: Plan) -> int:
    return sum(volume.bytes for (axis, _), volume in comm_volume(plan, 0).items() if axis == "ep")
