"""Ranks with the same instructions on units of the same sizes need the same memory."""

from __future__ import annotations

import pytest

from pentad.orchestrator.config.config import load
from pentad.orchestrator.planning import estimate
from pentad.orchestrator.planning.estimate import States, memory, pipeline_memories
from pentad.orchestrator.planning.planning import make_plan
from pentad.schedules.spec.plan import Plan

SIZES = "hidden=256 heads=16 kv_heads=8 ffn=512 vocab=32000 layers=37"
COMMON = [*(f"model.{word}" for word in SIZES.split()), "mesh.pp=4", "batch.sequence_length=1024"]
COMMON += ["schedule.microbatches=8", "batch.global_batch_size=32", "cluster.device=cuda"]
WITH_EXPERTS = "num_experts=8 top_k=2 intermediate_size=64 first_k_dense=12"
WINDOWS = "model.layer_types=[sliding_attention, full_attention]"
CHANGES: dict[str, list[str]] = {
    "plain": [],
    "zero-3": ["mesh.dp=4", "zero.stage=3", "memory.unit_layers=2"],
    "some recompute": ["mesh.dp=2", "zero.stage=2", "memory.recompute=full", "memory.recompute_layers=3"],
    "offloading": ["memory.offload_fraction=0.4"],
    "experts": [
        "model.family=qwen3-moe",
        "mesh.ep=2",
        "zero.stage=3",
        *(f"model.experts.{word}" for word in WITH_EXPERTS.split()),
    ],
    "windows": ["model.family=mistral", "model.sliding_window=128", WINDOWS],
    "8 bits": ["precision.matmul=fp8-tensor", "precision.fp8_skip_first_layers=3", "mesh.dp=2", "zero.stage=3"],
    "tied": ["model.tie_word_embeddings=true", "mesh.dp=2", "zero.stage=1"],
    "muon": ["optimizer.name=muon", "mesh.dp=2", "zero.stage=1"],
}


@pytest.mark.sampled(12)
@pytest.mark.parametrize("name", ["1f1b", "zb-v", "dualpipe", "seq-1f1b"])
@pytest.mark.parametrize("change", CHANGES)
def test_memory_of_alike_ranks_is_counted_once(name: str, change: str) -> None:
    plan = make_plan(load(None, [*COMMON, f"schedule.name={name}", *CHANGES[change]]), "cuda")
    assert pipeline_memories(plan) == [memory(plan, rank) for rank in plan.mesh.group(("pp",), 0)]


def test_ranks_between_the_ends_are_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    words, counted = ["mesh.pp=16", "model.layers=64", "schedule.microbatches=1"], list[int]()
    plan = make_plan(load(None, [*COMMON, *words]), "cuda")

    def counting(plan: Plan, rank: int, state: States | None) -> dict[str, int]:
        counted.append(rank)
        return memory(plan, rank, state)

    monkeypatch.setattr(estimate, "memory", counting)
    pipeline_memories(plan)
    assert counted == [0, 1, 12, 15]  # rank 12 has one layer more
