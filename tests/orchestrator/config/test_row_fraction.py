"""memory.recompute_fraction is accepted where layers work row by row, and refused in one sentence elsewhere."""

from __future__ import annotations

import pytest

from pentad.orchestrator.config.config import load
from pentad.orchestrator.planning.planning import make_plan
from pentad.schedules.ir.errors import PentadError

EXPERTS = (
    "model.family=mixtral",
    "model.experts.num_experts=4",
    "model.experts.top_k=2",
    "model.experts.intermediate_size=64",
)


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (
            ["recompute_fraction=0.5"],
            "memory.recompute is none, but memory.recompute_fraction is 0.5: expected attention",
        ),
        (
            ["recompute=full", "recompute_fraction=0.5"],
            "memory.recompute is full, but memory.recompute_fraction is 0.5: expected attention, selective, or a list",
        ),
        (["recompute=[core_attn]", "recompute_fraction=0.5"], "memory.recompute is [core_attn], but memory.recompute"),
        (
            ["recompute=attention", "recompute_fraction=1.5"],
            "memory.recompute_fraction is 1.5: expected 0 to 1, or auto",
        ),
        (
            ["recompute=attention", "recompute_fraction=0.0"],
            "memory.recompute_fraction is 0.0: expected above 0, or memory.recompute = none",
        ),
        (
            ["recompute=attention", "recompute_fraction=auto"],
            "memory.recompute_fraction is auto, but memory.offload_fraction is 0.0: expected a share",
        ),
        (
            ["recompute=attention", "recompute_fraction=auto", "offload_fraction=auto", "recompute_layers=1"],
            "memory.recompute_layers is 1, but memory.recompute_fraction is auto: expected null",
        ),
    ],
)
def test_a_bad_fraction_is_reported_in_one_sentence(overrides: list[str], sentence: str) -> None:
    with pytest.raises(PentadError) as caught:
        load(None, [f"memory.{override}" for override in overrides])
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["precision.matmul=fp8-block"], "with precision.matmul fp8-block, whose scales are"),
        (
            [*EXPERTS, "memory.recompute=selective"],
            "for this model, of which memory.recompute selective has experts only",
        ),
    ],
)
def test_what_does_not_work_on_rows_is_refused(overrides: list[str], sentence: str) -> None:
    with pytest.raises(PentadError) as caught:
        load(None, ["memory.recompute=attention", "memory.recompute_fraction=0.5", *overrides])
    assert f"memory.recompute_fraction is 0.5: expected 1 {sentence}" in str(caught.value)


def test_a_plan_has_the_fraction() -> None:
    config = load(None, ["memory.recompute=[attn_proj]", "memory.recompute_fraction=0.25"])
    assert make_plan(config, "cpu").recompute_fraction == 0.25
