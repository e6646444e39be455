"""Products in 8 bits on tensor ranks: scales are those of one process, and only the order of sums differs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fleet import Fleet
from fp8_plans import BLOCK, ROW, TENSOR, fp8_plan

from pentad.schedules.spec.model import Fp8Spec, ModelSpec

MODEL = ModelSpec(layers=1, hidden=256, heads=4, kv_heads=4, head_dim=128, ffn=512, vocab=512)  # whole tiles at tp 4


CASES: list[tuple[int, str]] = [(2, "gloo"), (2, "peer"), (4, "gloo")]


def first_step(
    fleet: Fleet, corpus: str, spec: Fp8Spec, *, tp: int, length: int, dtype: str, transport: str = "gloo"
) -> tuple[float, float]:
    """(loss, gradient norm); with transport peer, copies overlap with products."""
    plan = fp8_plan(spec, "1f1b", {"tp": tp, "model": MODEL, "microbatches": 1}, corpus)
    plan = replace(plan, dtype=dtype, batch=replace(plan.batch, sequence_length=length))
    plan = replace(plan, transport=transport, hosts=(0,) * tp)
    result = fleet.run(plan, [(0, 1)])[0].results[0]
    (source,) = result.sources
    return source.loss / source.target_tokens, result.grad_norm


@pytest.mark.sampled(1)
@pytest.mark.parametrize("spec", [BLOCK, TENSOR, ROW])
@pytest.mark.parametrize("length", [256, 128], ids=["whole tiles of rows", "parts of tiles of rows"])
def test_only_the_order_of_sums_depends_on_tensor_ranks(fleet, corpus, spec, length):
    """Sums in float64 agree so closely that no cast rounds to another value. In float32 some casts do, by up to an
    eighth of the number, which is far more than the sums differ: a different scale would show in float64."""
    for dtype, of_loss, of_norm in (("float64", 1e-13, 1e-12), ("float32", 1e-4, 2e-3)):
        loss, norm = first_step(fleet, corpus, spec, tp=1, length=length, dtype=dtype)
        for tp, transport in CASES:
            found, found_norm = first_step(fleet, corpus, spec, tp=tp, length=length, dtype=dtype, transport=transport)
            assert found == pytest.approx(loss, rel=of_loss)
            assert found_norm == pytest.approx(norm, rel=of_norm)
