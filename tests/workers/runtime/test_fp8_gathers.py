"""ZeRO-3 gathers matrices in 8 bits: the bits of a run are those of gathering them in the compute dtype and casting
them then."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from bits import same_bits
from exactness import state_like
from fleet import assemble
from fp8_plans import BLOCK, DELAYED, EXPERTS, LATENT, MIXTURE, SHARED, TENSOR, WIDE, WIDE_EXPERTS, fp8_plan

from pentad.schedules.spec.model import Fp8Spec
from pentad.schedules.spec.plan import Plan
from pentad.schedules.spec.schedule_spec import MemoryOptions
from pentad.schedules.spec.tensors import tensors

POWERS = replace(BLOCK, power_of_two=True, gradients="e5m2")
CASES: list[tuple[Fp8Spec, str, dict[str, Any]]] = [
    (BLOCK, "1f1b", {"dp": 2, "layers": 1}),
    (TENSOR, "1f1b", {"dp": 2, "layers": 1}),
    (POWERS, "1f1b", {"dp": 4, "layers": 2, "microbatches": 2}),
    (BLOCK, "1f1b", {"dp": 3, "layers": 2, "microbatches": 2}),
    *((spec, "1f1b", {"dp": 2, "layers": 3, "unit_layers": 1, "max_gathered": 2}) for spec in (BLOCK, TENSOR)),
    (BLOCK, "1f1b", {"dp": 4, "layers": 2, "unit_layers": 1, "microbatches": 2}),
    (TENSOR, "1f1b", {"dp": 2, "tp": 2, "layers": 2, "unit_layers": 1}),
    (BLOCK, "1f1b", {"cp": 2, "tp": 2, "layers": 2}),
    (EXPERTS, "1f1b", {"dp": 2, "layers": 2, "model": WIDE_EXPERTS}),
    (EXPERTS, "1f1b", {"dp": 2, "ep": 2, "layers": 2, "unit_layers": 1, "model": WIDE_EXPERTS, "max_gathered": 3}),
    (BLOCK, "1f1b", {"ep": 2, "layers": 3, "model": MIXTURE, "max_gathered": 1}),
    (TENSOR, "1f1b", {"ep": 2, "layers": 3, "model": MIXTURE, "unit_layers": 1}),
    (replace(TENSOR, shared_experts=True), "1f1b", {"ep": 2, "layers": 2, "model": SHARED}),
    (replace(BLOCK, skip_first=1, skip_last=1), "interleaved", {"pp": 2, "dp": 2, "max_gathered": 1}),
    (BLOCK, "zb-v", {"pp": 2, "dp": 2, "recompute": "full", "max_gathered": 1}),
    (TENSOR, "dualpipe", {"pp": 2, "microbatches": 4}),
    (BLOCK, "dualpipev", {"pp": 2, "dp": 2, "model": LATENT}),
    (DELAYED, "1f1b", {"pp": 2, "dp": 2}),
    (replace(BLOCK, head=True), "1f1b", {"dp": 2, "layers": 2, "model": WIDE, "unit_layers": 1}),
]


def plan_with(
    spec: Fp8Spec, name: str, sizes: dict[str, Any], corpus: str, *, gathers: bool, dtype: str = "float32"
) -> Plan:
    """No gradient is clipped, as partial sums of the norm follow the layout of shards; and terms of gradients are added
    in the order of ranks, whatever the layout."""
    sizes = {**sizes, "clip": 1e9, "dtype": dtype}
    options = MemoryOptions(zero=3, max_gathered=sizes.pop("max_gathered", None))
    plan = fp8_plan(replace(spec, gathers=gathers), name, {**sizes, "memory_options": options}, corpus)
    return replace(plan, bf16_reduce=True)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("spec", "name", "sizes"), [pytest.param(*case, marks=[pytest.mark.slow] * (i > 1)) for i, case in enumerate(CASES)]
)
def test_bits_are_those_of_weights_that_are_cast_after_the_gather(fleet, corpus, spec, name, sizes):
    plan = plan_with(spec, name, sizes, corpus, gathers=True)
    assert any(plan.size_in_8_bits(shard) for shard in plan.param_shards)
    found = fleet.run(plan, [(0, 3)])
    want = fleet.run(plan_with(spec, name, sizes, corpus, gathers=False), [(0, 3)])
    for a, b in zip(found, want, strict=True):
        assert [each.losses for each in a.results] == [each.losses for each in b.results]
    like = state_like({tensor.name: torch.empty(tensor.shape) for tensor in tensors(plan.model)})
    assert same_bits(*(assemble([each.state for each in outcomes], like) for outcomes in (found, want)))
