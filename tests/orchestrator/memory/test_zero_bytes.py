"""The bytes of ZeRO are those of the paper (arXiv 1910.02054, section 5) plus two unsharded units."""

from __future__ import annotations

import pytest

from pentad.orchestrator.config.config import load
from pentad.orchestrator.planning.estimate import memories
from pentad.orchestrator.planning.planning import make_plan
from pentad.schedules.spec.plan import Plan

LAYERS = 16
SIZES = [f"model.layers={LAYERS}", "model.hidden=256", "model.ffn=1024", "memory.unit_layers=1", "mesh.pp=1"]
BATCH = ["batch.global_batch_size=32", "cluster.device=cuda", "schedule.microbatches=4", "schedule.name=1f1b"]
MESHES = {
    "dp4": ["mesh.dp=4"],
    "dp2 x cp2": ["mesh.dp=2", "mesh.cp=2"],
    "dp2 x pp2": ["mesh.dp=2", "mesh.pp=2"],
    "dp2 x tp2": ["mesh.dp=2", "mesh.tp=2"],
    "dualpipe": ["mesh.dp=2", "mesh.pp=2", "schedule.name=dualpipe"],
}


def plan_of(mesh: str, *words: str) -> Plan:
    return make_plan(load(None, [*SIZES, *BATCH, *MESHES[mesh], *words]), "cuda")


def parameters(plan: Plan, rank: int) -> dict[int, int]:
    """Unit -> number of parameters of a rank, before sharding."""
    found = dict.fromkeys(plan.stages_of(rank), 0)
    for shard in plan.param_shards_of(rank):
        found[shard.stage] += plan.size(shard)
    return found


@pytest.mark.sampled(8)
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_state_is_shards_and_two_units(mesh: str, zero: int, recompute: str) -> None:
    """Parameters/N + two units, gradients/N + at most two units, optimizer/N. The shards count beside the units."""
    plan = plan_of(mesh, f"zero.stage={zero}", f"memory.recompute={recompute}")
    for rank, found in enumerate(memories(plan)):
        units = parameters(plan, rank)
        count = plan.num_zero_shards(plan.param_shards_of(rank)[0])
        total, two = sum(units.values()), sum(sorted(units.values())[-2:])
        assert count == plan.mesh.dp * plan.mesh.cp * len(plan.program.holders(0))
        padding = 1 + 64 * count * len(units) / total  # shards are padded to 128 bytes
        assert 1 <= found["optimizer"] / (8 * total / count) <= padding
        assert 1 <= found["master"] / (2 * total / count) <= padding  # lower halves; the weights are the upper ones
        weights = 2 * (total / count + two) if zero == 3 else 2 * total
        assert weights * 0.999 <= found["parameters"] <= weights * padding
        gradients = 4 * (total / count + two) if zero > 1 else 4 * total
        assert found["gradients"] <= gradients * padding
        least = 4 * (total / count + max(units.values())) if zero > 1 else gradients
        assert found["gradients"] >= least * 0.999


@pytest.mark.parametrize("zero", [2, 3])
def test_experts_have_units_of_their_own(zero: int) -> None:
    experts = ["model.experts.num_experts=4", "model.experts.top_k=2", "model.experts.intermediate_size=256"]
    words = [*experts, f"zero.stage={zero}", "mesh.ep=2", "model.family=mixtral"]
    plan = make_plan(load(None, [*SIZES, *BATCH, "mesh.dp=2", *words]), "cuda")
    found, shards = memories(plan)[0], plan.param_shards_of(0)
    state = sum(plan.size(shard) / plan.num_zero_shards(shard) for shard in shards)
    kinds = [[plan.size(shard) for shard in shards if shard.experts is each] for each in (False, True)]
    two = sum(sum(sorted(sizes)[-2:]) for sizes in kinds)
    assert {plan.num_zero_shards(shard) for shard in shards if shard.experts} == {2}
    assert found["gradients"] <= 4 * (state + two) * 1.01
    assert zero < 3 or found["parameters"] == pytest.approx(2 * (state + two), rel=0.01)
