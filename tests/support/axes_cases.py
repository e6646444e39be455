"""What test_axes.py shares with other tests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from fleet import Fleet, assembled, losses_of
from plans import MODEL, STEPS, close, plan_of, reference

from pentad.schedules.spec.model import MLA, Experts, RopeScaling
from pentad.schedules.spec.plan import Plan

HEADS = replace(MODEL, kv_heads=4)  # for ranks that exchange heads


ROUTED = Experts(
    num_experts=4,
    top_k=2,
    intermediate_size=12,
    shared_intermediate_size=8,
    aux_loss_coef=0.1,
    bias_update_rate=0.01,
    first_k_dense=1,
)


MIXED = replace(MODEL, experts=ROUTED)


FAMILIES = {
    "llama 3.1": replace(MODEL, rope_scaling=RopeScaling("llama3", 4.0, 4, 1.0, 4.0)),
    "qwen3": replace(MODEL, head_dim=6, qk_norm=True, tie_word_embeddings=True),
    "mixtral": replace(MODEL, experts=Experts(num_experts=4, top_k=2, intermediate_size=12)),
    "qwen3-moe": replace(MODEL, head_dim=6, qk_norm=True, experts=Experts(4, 3, 8, norm_topk_prob=False)),
    "deepseek-v3": replace(
        MODEL,
        layers=4,
        kv_heads=4,
        mla=MLA(kv_lora_rank=6, q_lora_rank=10, qk_nope_head_dim=4, qk_rope_head_dim=2, v_head_dim=3),
        experts=Experts(
            8, 3, 6, 4, "sigmoid", True, 2.5, num_groups=4, topk_groups=2, bias_update_rate=0.01, first_k_dense=1
        ),
        rope_scaling=RopeScaling("yarn", 4.0, 4, 1.0, 32.0, attention_factor=1.2, softmax_factor=1.3),
    ),
    "deepseek-v2-lite": replace(
        MODEL, kv_heads=4, mla=MLA(kv_lora_rank=6, q_lora_rank=0, qk_nope_head_dim=4, qk_rope_head_dim=2, v_head_dim=8)
    ),
}


def made(data: str, name: str, sizes: dict[str, int], **more: Any) -> Plan:
    rest: dict[str, Any] = {axis: size for axis, size in sizes.items() if axis not in ("dp", "pp")}
    count = 2 * sizes["pp"] if name == "dualpipe" else 4
    return plan_of(name, sizes.get("dp", 1), sizes.get("pp", 1), count, data, **rest, **more)


def equals_one_process(fleet: Fleet, plan: Plan) -> None:
    losses, gradients, norms, weights = reference(plan)
    outcomes = fleet.run(plan, [(0, 2), (2, 1)])
    for step in range(STEPS):
        sums = losses_of(outcomes, step).values()
        assert len(sums) == plan.batch.replicas * plan.batch.microbatches
        assert sum(sums) / plan.batch.tokens == pytest.approx(losses[step], rel=1e-10)
        for outcome in outcomes:
            assert outcome.results[step].grad_norm == pytest.approx(norms[step], rel=1e-10)
        found = assembled([outcome.gradients[step] for outcome in outcomes], like(weights))
        for copy in found.keys() & {"head", "predicted.embedding"} - weights.keys():
            assert torch.equal(found.pop(copy), found["embedding"])
        assert found.keys() == {name for name in weights if not name.endswith(".bias")}
        for name, gradient in found.items():
            assert close(gradient, gradients[step][name]), f"step {step}: gradient of {name}"
    kept = {f"model.{name}": weight for name, weight in weights.items()}
    states = [{k: v for k, v in outcome.state.items() if k.startswith("model.")} for outcome in outcomes]
    found = assembled(states, like(kept))
    for copy in found.keys() - kept.keys():
        assert torch.equal(found.pop(copy), found["model.embedding"])
    for name, weight in found.items():
        assert close(weight, kept[name]), f"weights of {name}"


def like(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Also of copies of the embedding, which has its shape."""
    (embedding,) = (name for name in weights if name.endswith("embedding"))
    copies = (embedding.replace("embedding", name) for name in ("head", "predicted.embedding"))
    return dict.fromkeys(copies, weights[embedding]) | weights
