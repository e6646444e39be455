"""Small plans with FP8 products."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from plans import plan_of

from pentad.schedules.spec.model import MLA, Experts, Fp8Spec, ModelSpec
from pentad.schedules.spec.plan import Plan
from pentad.schedules.spec.schedule_spec import MemoryOptions

# Whole tiles of 128 on two tensor ranks.
MODEL = ModelSpec(layers=4, hidden=128, heads=2, kv_heads=2, head_dim=128, ffn=256, vocab=300)
MIXTURE = replace(MODEL, experts=Experts(4, 2, 24, first_k_dense=2))
WIDE_EXPERTS = replace(MODEL, experts=Experts(4, 2, 256, first_k_dense=1, shared_intermediate_size=24))
EXPERTS = Fp8Spec("block", experts=True)
WIDE = replace(MODEL, vocab=512)
TIED = replace(WIDE, tie_word_embeddings=True)
PREDICTING = replace(WIDE, mtp_layers=1)
SHARED = replace(MODEL, experts=Experts(4, 2, 256, first_k_dense=1, shared_intermediate_size=256))
LATENT = replace(MODEL, mla=MLA(128, 128, qk_nope_head_dim=128, qk_rope_head_dim=128, v_head_dim=128))
LENGTH = 128  # the least tokens of a sequence on a context rank
BLOCK, TENSOR, ROW = Fp8Spec("block"), Fp8Spec("tensor", "e5m2"), Fp8Spec("row", power_of_two=True)
DELAYED = replace(TENSOR, delayed=True)
ZERO_3 = {"memory_options": MemoryOptions(zero=3)}


def fp8_plan(spec: Fp8Spec, name: str, sizes: dict[str, Any], corpus: str) -> Plan:
    sizes = {"dp": 1, "pp": 1, **sizes}
    model = sizes.pop("model", MODEL)
    model = replace(model, layers=sizes.pop("layers", model.layers))
    microbatches = sizes.pop("microbatches", 3 if model.layers < MODEL.layers else 4)
    plan = plan_of(name, microbatches=microbatches, data=corpus, model=model, fp8=spec, **sizes)
    length = LENGTH * plan.mesh.cp * (2 if plan.mesh.cp > 1 and spec.scaling == "block" else 1)
    return replace(plan, batch=replace(plan.batch, sequence_length=length))
