"""The planner's activation memory equals what stages save, to the byte, for every family, axis and recompute mode."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, product
from typing import Any

import pytest
import torch
from fake_groups import FAMILIES, in_tiles, make_stage, nbytes, stage_plan
from plans import plan_of

from pentad.orchestrator.activations.activation_peaks import activations_of
from pentad.orchestrator.activations.allocations import piece_of
from pentad.orchestrator.activations.offloaded_tensors import offloadable
from pentad.schedules.passes.recompute import PARTS
from pentad.schedules.passes.recompute import RECOMPUTE_MODES as MODES
from pentad.schedules.spec.model import Fp8Spec, Scaling
from pentad.schedules.spec.plan import Plan
from pentad.workers.model.base_stage import StageInputs
from pentad.workers.parallel.async_ops import run_to_completion
from pentad.workers.params.parameters import DTYPES


def check(plan: Plan, index: int) -> None:
    """Runs F, RECOMPUTE and B and compares the bytes saved after each, excluding receive slots."""
    stage, planned, mode = make_stage(plan, index), activations_of(plan, index), plan.recompute_mode(index)
    dtype, shape = DTYPES[plan.dtype], (plan.sequence_parallel_tokens, plan.model.hidden)
    tokens = torch.arange(plan.slice_tokens)
    received = None if stage.first else torch.randn(shape).to(dtype)
    starts: list[tuple[int, int]] = [(0, 3)] * plan.batch.micro_batch_size if plan.data.document_mask else []
    bound = [each for buffers in stage.param_buffers for each in buffers.bound if each is not None]
    excluded = [*(each.flat for each in bound), received, tokens]
    mtp_tokens = tokens.expand(plan.model.mtp_layers, -1) if stage.last else None
    ends = tokens if stage.first else None, tokens if stage.last else None

    run_to_completion(stage.forward(0, StageInputs(received, *ends, mtp_tokens, document_starts=starts)))
    received_bytes = 0 if stage.first else planned.input
    assert nbytes(stage.saved[0][1:], *excluded) == planned.kept(mode) - received_bytes
    sizes = offloadable(plan.model, plan.layers[index], piece_of(plan), mode, is_sent=not stage.first)
    assert sorted(each.nbytes() for each in stage.offloadable(0)) == sorted(sizes)
    if mode != "none":
        stage.recompute(0)
        assert nbytes(stage.saved[0][1:], *excluded) == planned.saved - received_bytes
    moved = sum(each.nbytes() for each in stage.offloadable(0))
    assert planned.saved - received_bytes - moved == planned.not_offloadable

    dy = None if stage.last else torch.randn(shape).to(dtype)
    run_to_completion(stage.backward_input(0, dy))
    assert nbytes(stage.deferred[0], *excluded, dy) == planned.deferred - planned.incoming


CASES: list[tuple[str, dict[str, Any]]] = [*((mode, {}) for mode in MODES), *((mode, {"tp": 2}) for mode in MODES)]
CASES.append(("none", {"tp": 4}))
CASES += [(part, {}) for part in PARTS]
PAIRS = [",".join(pair) for pair in combinations(PARTS, 2)]
EVERY = ",".join(PARTS)
SCALINGS: list[Scaling] = ["tensor", "row", "block"]
ROW_AXES: list[dict[str, Any]] = [{}, {"tp": 2}, {"cp": 2}, {"cp": 2, "cp_method": "ulysses"}]
CONTEXT_PARALLEL: list[dict[str, Any]] = [
    {"cp": 2, "cp_method": method} for method in ("ring", "all_gather", "ulysses")
]


@pytest.mark.sampled(12)
@pytest.mark.parametrize(("mode", "axes"), CASES)
@pytest.mark.parametrize("family", FAMILIES)
def test_stages(one_rank, corpus, family, mode, axes):
    for index in range(3):
        check(stage_plan(corpus, family, mode, **axes), index)


@pytest.mark.parametrize("axes", [{}, {"tp": 2}])
@pytest.mark.parametrize("mode", ["none", "full"])
@pytest.mark.parametrize("family", ["gemma2", "deepseek with mtp"])
def test_last_stages_that_make_logits_in_chunks(one_rank, corpus, family, mode, axes):
    check(stage_plan(corpus, family, mode, logit_rows=5, **axes), 2)


@pytest.mark.slow
@pytest.mark.parametrize(("parts", "axes"), [*product(PARTS, [{"tp": 2}]), *product([*PAIRS, EVERY], [{}, {"tp": 2}])])
@pytest.mark.parametrize("family", FAMILIES)
def test_stages_with_recomputed_parts(one_rank, corpus, family, parts, axes):
    for index in range(3):
        check(stage_plan(corpus, family, parts, **axes), index)


ROW_CASES: list[tuple[str, str, dict[str, Any]]] = [
    (family, mode, axes)
    for family, mode, axes in product(FAMILIES, ("attention", "mlp", "qkv_linear", "attn_proj", EVERY), ROW_AXES)
]
ALWAYS_BY_ROWS = [("qwen3", "attention", {"tp": 2}), ("gemma2", EVERY, {}), ("deepseek", "attention", {})]
ALWAYS_BY_ROWS.append(("qwen3", "attention", ROW_AXES[-1]))


@pytest.mark.parametrize(
    ("family", "mode", "axes"),
    [case if case in ALWAYS_BY_ROWS else pytest.param(*case, marks=pytest.mark.slow) for case in ROW_CASES],
)
def test_stages_that_recompute_some_rows(one_rank, corpus, family, mode, axes):
    for index in range(3):
        plan = replace(stage_plan(corpus, family, mode, **axes), recompute_fraction=0.5)
        assert piece_of(plan).saved_rows
        check(plan, index)


@pytest.mark.sampled(10)
@pytest.mark.parametrize("axes", [*CONTEXT_PARALLEL, {"cp": 2, "tp": 2}])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("mode", ["none", "attention", "core_attn"])
@pytest.mark.parametrize("family", ["llama", pytest.param("qwen3", marks=pytest.mark.slow), "deepseek"])
def test_context_parallel_stages(one_rank, corpus, family, mode, masked, axes):
    check(stage_plan(corpus, family, mode, document_mask=masked, **axes), 1)


@pytest.mark.parametrize("mode", ["none", "attention"])
@pytest.mark.parametrize("family", ["llama", "deepseek"])
def test_stages_with_document_masks(one_rank, corpus, family, mode):
    check(stage_plan(corpus, family, mode, document_mask=True), 1)


@pytest.mark.parametrize("axes", [{"ep": 2}, {"ep": 2, "tp": 2}, {"ep": 4}, {"ep": 2, "cp": 2}])
@pytest.mark.parametrize("mode", ["none", pytest.param("attention", marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", ["mixtral", "deepseek"])
def test_expert_parallel_stages(one_rank, corpus, family, mode, axes):
    check(stage_plan(corpus, family, mode, **axes), 1)


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_stages_in_narrow_dtypes(one_rank, corpus, family, dtype):
    check(stage_plan(corpus, family, "none", dtype=dtype), 1)


def cases_in_8_bits() -> list[Any]:
    always = [("llama", "block", "none", {}), ("gemma2", "tensor", "attention", {"tp": 2})]
    families = ["llama", "qwen3", "olmo2", "gemma2", "mixtral", "deepseek", "deepseek without q_lora"]
    sizes = product(families, SCALINGS, ["none", "attention", "core_attn", EVERY], [{}, {"tp": 2}])
    return [pytest.param(*case, marks=[] if case in always else [pytest.mark.slow]) for case in sizes]


@pytest.mark.parametrize(("family", "scaling", "mode", "axes"), cases_in_8_bits())
def test_stages_in_8_bits(one_rank, corpus, family, scaling, mode, axes):
    """The first of the four layers stays in the compute dtype."""
    plan = plan_of("gpipe", 1, 2, 1, corpus, model=in_tiles(FAMILIES[family]), recompute=mode, **axes)
    plan = replace(plan, fp8=Fp8Spec(scaling, skip_first=1), batch=replace(plan.batch, sequence_length=128))
    for index in range(2):
        check(plan, index)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("axes", [{}, {"tp": 2}])
@pytest.mark.parametrize("mode", ["none", "full"])
@pytest.mark.parametrize(("family", "scaling"), [("llama", "block"), ("gemma2", "tensor"), ("deepseek", "row")])
def test_heads_in_8_bits(one_rank, corpus, family, scaling, mode, axes):
    """A model with multi-token prediction uses the head in the compute dtype as well."""
    model = replace(in_tiles(FAMILIES[family]), vocab=512)
    plan = plan_of("gpipe", 1, 2, 1, corpus, model=model, recompute=mode, **axes)
    check(replace(plan, fp8=Fp8Spec(scaling, head=True), batch=replace(plan.batch, sequence_length=128)), 1)


EXPERTS = [("mixtral", "none"), ("mixtral", "moe"), ("mixtral", "full"), ("deepseek", "none")]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("axes", [{}, {"ep": 2}, {"ep": 2, "tp": 2}, {"ep": 4}])
@pytest.mark.parametrize(("family", "mode"), EXPERTS)
def test_experts_in_8_bits(one_rank, corpus, family, mode, axes):
    plan = plan_of("gpipe", 1, 2, 1, corpus, model=in_tiles(FAMILIES[family]), recompute=mode, **axes)
    spec = Fp8Spec("block", skip_first=1, experts=True)
    check(replace(plan, fp8=spec, batch=replace(plan.batch, sequence_length=128)), 1)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("mode", ["none", "moe"])
@pytest.mark.parametrize("axes", [{}, {"ep": 2}, {"tp": 2}, {"ep": 2, "tp": 2}])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_shared_experts_in_8_bits(one_rank, corpus, scaling, axes, mode):
    model = in_tiles(FAMILIES["deepseek"])
    assert model.experts is not None
    model = replace(model, experts=replace(model.experts, shared_intermediate_size=256))
    plan = plan_of("gpipe", 1, 2, 1, corpus, model=model, recompute=mode, **axes)
    for experts in (False, True)[: 1 + (scaling == "block")]:
        spec = Fp8Spec(scaling, skip_first=1, experts=experts, shared_experts=True)
        check(replace(plan, fp8=spec, batch=replace(plan.batch, sequence_length=128)), 1)
