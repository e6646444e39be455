"""What the planner says of activations is what the layers keep, to the byte: every family, every axis, every mode.

Other ranks are played: what would come from them has the right shape, and its values matter to no one here.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from layer_cases import (
    FAMILIES,
    made,
    plan,
    size,
)

from pentad.orchestrator.planning.activation_peaks import activations_of
from pentad.schedules.spec.plan import Plan
from pentad.workers.model.stage import Stage
from pentad.workers.parallel.async_ops import run_to_completion
from pentad.workers.params.parameters import DTYPES

MODES = ("none", "selective", "full")


def gradients(stage: Stage) -> list[torch.Tensor]:
    return [bank.gradients.flat for bank in stage.param_buffers if bank.gradients is not None]


def check(plan: Plan, index: int) -> None:
    """F, RECOMPUTE, B: what is kept after each, without what lies in the slots of transfers."""
    stage, of, mode = made(plan, index), activations_of(plan, index), plan.recompute_mode(index)
    tokens = torch.arange(plan.slice_tokens)
    shape = plan.sequence_parallel_tokens, plan.model.hidden
    dtype = DTYPES[plan.dtype]
    received = None if stage.first else torch.randn(shape).to(dtype)
    starts: list[tuple[int, int]] = [(0, 3)] * plan.batch.micro_batch_size if plan.document_mask else []
    fixed = [*gradients(stage), received, tokens]
    further = tokens.expand(plan.model.mtp_layers, -1) if stage.last else None
    ends = tokens if stage.first else None, tokens if stage.last else None
    run_to_completion(stage.forward(0, received, *ends, further, starts))
    saved = of.saved - (0 if stage.first else of.input)
    said = {"none": saved, "selective": saved - of.recomputable, "full": 0}[mode]
    found = size(stage.saved[0][1:], *fixed)
    assert found == said
    if mode != "none":
        stage.recompute(0)
        found = size(stage.saved[0][1:], *fixed)
        assert found == saved
    stays = found - sum(each.nbytes() for each in stage.offloadable(0))
    assert stays == of.not_offloadable
    dy = None if stage.last else torch.randn(shape).to(dtype)
    run_to_completion(stage.backward_input(0, dy))
    found = size(stage.deferred[0], *fixed, dy)
    assert found == of.deferred - of.incoming


CASES: list[tuple[str, dict[str, Any]]] = [*((mode, {}) for mode in MODES), *((mode, {"tp": 2}) for mode in MODES)]
CASES.append(("none", {"tp": 4}))
SHARED: list[dict[str, Any]] = [{"cp": 2, "cp_method": way} for way in ("ring", "all_gather", "ulysses")]


@pytest.mark.parametrize(("mode", "axes"), CASES)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_stage_keeps_what_is_planned(alone, corpus, family, mode, axes):
    for index in range(3):
        check(plan(corpus, family, mode, **axes), index)


@pytest.mark.parametrize("axes", [*SHARED, {"cp": 2, "tp": 2}])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen3", "deepseek"])
def test_context_ranks_keep_what_is_planned(alone, corpus, family, packed, axes):
    check(plan(corpus, family, "none", document_mask=packed, **axes), 1)


@pytest.mark.parametrize("family", ["llama", "deepseek"])
def test_packed_documents_keep_what_is_planned(alone, corpus, family):
    check(plan(corpus, family, "none", document_mask=True), 1)


@pytest.mark.parametrize("axes", [{"ep": 2}, {"ep": 2, "tp": 2}, {"ep": 4}, {"ep": 2, "cp": 2}])
@pytest.mark.parametrize("family", ["mixtral", "deepseek"])
def test_experts_keep_what_is_planned(alone, corpus, family, axes):
    check(plan(corpus, family, "none", **axes), 1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_narrow_dtypes_keep_what_is_planned(alone, corpus, family, dtype):
    check(plan(corpus, family, "none", dtype=dtype), 1)
