"""Products in 8 bits as configured: what becomes the plan's, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pentad.orchestrator.config.config import load
from pentad.orchestrator.planning.numerics import require_fp8
from pentad.orchestrator.planning.planning import make_plan
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.spec.model import Fp8Spec
from pentad.schedules.spec.plan import Plan

MODEL = {"family": "llama", "layers": 4, "hidden": 256, "heads": 2, "kv_heads": 2, "ffn": 512, "vocab": 300}


def plan_with(precision: dict[str, Any], **sections: dict[str, Any]) -> Plan:
    given: dict[str, Any] = {
        "run": {"name": "fp8", "steps": 2},
        "model": MODEL,
        "mesh": {"pp": 2},
        "schedule": {"name": "1f1b", "microbatches": 2},
        "batch": {"global_batch_size": 2, "sequence_length": 128},
        "data": {"path": "builtin:pydoc"},
    }
    for name, section in sections.items():
        given[name] = {**given.get(name, {}), **section}
    return make_plan(load({**given, "precision": precision}), "cpu")


def test_the_configured_recipe_is_the_plans() -> None:
    assert plan_with({}).fp8 is None
    found = plan_with({"matmul": "fp8-row", "fp8_gradients": "e5m2", "fp8_skip_last_layers": 1}).fp8
    assert found == Fp8Spec("row", "e5m2", skip_last=1)
    assert [found.covers(layer, 4) for layer in range(4)] == [True, True, True, False]


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"batch": {"sequence_length": 96}}, "tokens of a microbatch that a rank holds at once is 96"),
        ({"model": {"ffn": 320}}, "model.ffn is 320: expected a multiple of 128"),
        ({"model": {"heads": 4, "kv_heads": 1}}, r"keys' width \(model.kv_heads x head_dim\) is 64"),
        (
            {"mesh": {"pp": 1, "tp": 2}, "model": {"ffn": 384}},
            r"model.ffn on each of 2 tensor ranks \(mesh.tp\) is 192",
        ),
        (
            {"precision": {"fp8_skip_first_layers": 3, "fp8_skip_last_layers": 1}},
            "is 4: expected fewer than model.layers",
        ),
    ],
)
def test_what_does_not_fit_is_refused_in_one_sentence(sections: dict[str, Any], message: str) -> None:
    precision = {"matmul": "fp8-block", **sections.pop("precision", {})}
    with pytest.raises(PentadError, match=message) as error:
        plan_with(precision, **sections)
    assert "\n" not in str(error.value)


def test_a_gpu_without_8_bit_products_is_refused() -> None:
    plan = replace(plan_with({"matmul": "fp8-tensor"}), device="cuda")
    require_fp8(plan, "NVIDIA H200")
    with pytest.raises(PentadError, match="fp8-tensor on NVIDIA A100-SXM4-80GB, which multiplies no 8-bit numbers"):
        require_fp8(plan, "NVIDIA A100-SXM4-80GB")
