"""Law 1 on meshes of more than two axes: the loss, the gradients and the weights of one process."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from exactness import assert_equals_one_process, state_like
from fleet import assemble, losses_of
from plans import MODEL, is_close, plan_of, plan_on_mesh, reference
from resume import commit, run_and_save
from small_models import FAMILIES, HEADS, MOE, ROUTED

from pentad.schedules.spec.model import ModelSpec
from pentad.schedules.spec.plan import Plan
from pentad.schedules.spec.schedule_spec import MemoryOptions
from pentad.workers.checkpoint import checkpoint
from pentad.workers.checkpoint.shards import read
from pentad.workers.params.router_bias import LOAD_EVERY
from pentad.workers.runtime.results import total_load

slow = pytest.mark.slow
TENSOR = [
    pytest.param("1f1b", {"tp": 2}, marks=slow),
    ("1f1b", {"tp": 4}),
    ("zb-h2", {"tp": 2, "pp": 2}),
    pytest.param("dualpipe", {"tp": 2, "pp": 2}, marks=slow),
    pytest.param("gpipe", {"tp": 2, "dp": 2}, marks=slow),
]
CONTEXT = [
    pytest.param("1f1b", {"cp": 2}, "ring", marks=slow),
    ("zb-h2", {"cp": 2, "pp": 2}, "all_gather"),
    ("gpipe", {"cp": 2, "tp": 2}, "ulysses"),
    ("1f1b", {"cp": 4}, "ring"),
    pytest.param("1f1b", {"cp": 4}, "all_gather", marks=slow),
    pytest.param("dualpipe", {"cp": 2, "pp": 2}, "ring", marks=slow),
    pytest.param("1f1b", {"cp": 2, "dp": 2}, "ulysses", marks=slow),
]
EXPERT = [
    pytest.param("gpipe", {}, 0, marks=slow),
    pytest.param("1f1b", {"ep": 2}, 0, marks=slow),
    pytest.param("1f1b", {"ep": 4}, 0, marks=slow),
    pytest.param("zb-h2", {"ep": 2, "pp": 2}, 0, marks=slow),
    ("dualpipe", {"ep": 2, "pp": 2}, 0),
    pytest.param("1f1b", {"ep": 2, "tp": 2}, 0, marks=slow),
    ("1f1b", {"ep": 2, "dp": 2}, 3),
    ("gpipe", {"ep": 2, "cp": 2}, 0),
]
LIKE_OTHERS = {"qwen2", "mistral", "olmo2", "gemma2"}  # other families have their parts, too
FAMILY = [
    *(pytest.param(name, "gpipe", {}, marks=slow if name in LIKE_OTHERS else []) for name in FAMILIES),
    ("olmo2", "zb-h2", {"tp": 2}),
    pytest.param("olmo2", "zb-h2", {"tp": 4}, marks=slow),
    pytest.param("llama 3.1", "zb-h2", {"pp": 2, "cp": 2}, marks=slow),
    pytest.param("qwen3", "zb-h2", {"tp": 4}, marks=slow),
    pytest.param("qwen3", "1f1b", {"tp": 2, "pp": 2}, marks=slow),
    pytest.param("qwen3-moe", "zb-v", {"ep": 2, "pp": 2}, marks=slow),
    pytest.param("mixtral", "1f1b", {"tp": 4}, marks=slow),
    ("deepseek-v3", "zb-h2", {"tp": 2, "pp": 2}),
    ("deepseek-v3", "1f1b", {"ep": 2, "cp": 2}),
    pytest.param("deepseek-v3", "dualpipe", {"pp": 2, "ep": 2}, marks=slow),
    pytest.param("deepseek-v2-lite", "1f1b", {"tp": 2, "cp": 2}, marks=slow),
]
TIED = [
    pytest.param("gpipe", {"tp": 2}, 0, marks=slow),
    pytest.param("zb-h2", {"pp": 4}, 0, marks=slow),
    ("1f1b", {"pp": 2, "dp": 2}, 3),
    ("dualpipe", {"tp": 2, "pp": 2}, 0),
    pytest.param("dualpipe", {"pp": 4}, 1, marks=slow),
    pytest.param("zb-v", {"pp": 2, "tp": 2}, 0, marks=slow),
]
MULTI_TOKEN = [
    pytest.param("gpipe", {}, False, marks=slow),
    pytest.param("zb-h2", {"pp": 4}, False, marks=slow),
    ("1f1b", {"pp": 2, "tp": 2}, True),
    ("dualpipe", {"pp": 2, "ep": 2}, False),
    pytest.param("zb-v", {"pp": 2, "cp": 2}, True, marks=slow),
]


def shallow_plan(corpus: str, name: str, sizes: dict[str, int], model: ModelSpec = MODEL, **more: Any) -> Plan:
    """Four layers, enough for every stage here: each collective inside a layer wakes all ranks of its group."""
    return plan_on_mesh(corpus, name, sizes, model=replace(model, layers=4), **more)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("name", "sizes"), TENSOR)
def test_tensor_parallelism(fleet, corpus, name, sizes):
    assert_equals_one_process(fleet, plan_on_mesh(corpus, name, sizes, model=replace(MODEL, layers=2)))


@pytest.mark.slow
def test_tensor_parallelism_with_zero(fleet, corpus):
    options = MemoryOptions(zero=3)
    assert_equals_one_process(fleet, shallow_plan(corpus, "1f1b", {"tp": 2, "dp": 2}, memory_options=options))


@pytest.mark.slow
@pytest.mark.parametrize(
    "recompute", ["attention", *(pytest.param(each, marks=slow) for each in ("selective", "full"))]
)
def test_tensor_parallelism_with_recomputation(fleet, corpus, recompute):
    assert_equals_one_process(fleet, shallow_plan(corpus, "zb-h2", {"tp": 2, "pp": 2}, recompute=recompute))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("document_mask", [True, pytest.param(False, marks=slow)])
@pytest.mark.parametrize(("name", "sizes", "method"), CONTEXT)
def test_context_parallelism(fleet, corpus, name, sizes, method, document_mask):
    plan = shallow_plan(corpus, name, sizes, model=HEADS, cp_method=method, document_mask=document_mask)
    assert_equals_one_process(fleet, plan)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("name", "sizes", "zero"), EXPERT)
def test_expert_parallelism(fleet, corpus, name, sizes, zero):
    plan = shallow_plan(corpus, name, sizes, model=MOE, memory_options=MemoryOptions(zero=zero))
    assert_equals_one_process(fleet, plan)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("family", "name", "sizes"), FAMILY)
def test_model_families(fleet, corpus, family, name, sizes):
    assert_equals_one_process(fleet, shallow_plan(corpus, name, sizes, model=FAMILIES[family]))


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("name", "sizes", "zero"), TIED)
def test_tied_embeddings(fleet, corpus, name, sizes, zero):
    tied = replace(MODEL, tie_word_embeddings=True)
    plan = shallow_plan(corpus, name, sizes, model=tied, memory_options=MemoryOptions(zero=zero))
    assert_equals_one_process(fleet, plan)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("name", "sizes", "tied"), MULTI_TOKEN)
def test_multi_token_prediction(fleet, corpus, name, sizes, tied):
    model = replace(FAMILIES["deepseek-v3"], mtp_layers=2, tie_word_embeddings=tied)
    assert_equals_one_process(fleet, shallow_plan(corpus, name, sizes, model=model, document_mask="cp" in sizes))


MESH_CHANGES = [
    pytest.param({"tp": 4}, {"ep": 2, "pp": 2}, marks=slow),
    ({"ep": 2, "dp": 2, "zero": 3}, {"tp": 2, "cp": 2}),
    pytest.param({"ep": 4}, {"tp": 2, "ep": 2}, marks=slow),
    pytest.param({"tp": 2, "pp": 2}, {"dp": 4, "zero": 2}, marks=slow),
]


@pytest.mark.parametrize(("before", "after"), MESH_CHANGES)
def test_a_checkpoint_resumes_on_any_mesh(fleet, corpus, tmp_path, before, after):
    """Two steps on one mesh and one on another are three steps of one process."""
    experts = replace(ROUTED, first_k_dense=0)
    model = replace(FAMILIES["qwen3-moe"], layers=4, tie_word_embeddings=True, experts=experts)

    def plan(sizes: dict[str, int]) -> Any:
        axes: dict[str, Any] = {"dp": 1, "pp": 1, **sizes}
        options = MemoryOptions(zero=axes.pop("zero", 0))
        microbatches = 4 // (axes["dp"] * axes.get("ep", 1))
        name = "zb-h2" if axes["pp"] > 1 else "gpipe"
        return plan_of(name, microbatches=microbatches, data=corpus, model=model, memory_options=options, **axes)

    folder = checkpoint.folder_of(tmp_path, 2)
    run_and_save(fleet, plan(before), 2, folder)
    losses, _, norms, weights = reference(plan(before))
    outcomes = fleet.run(plan(after), [(2, 1)], restore=str(folder))
    sums = losses_of(outcomes).values()
    assert sum(sums) / plan(after).batch.tokens == pytest.approx(losses[2], rel=1e-10)
    assert outcomes[0].results[0].grad_norm == pytest.approx(norms[2], rel=1e-10)
    weights = {name: weight for name, weight in weights.items() if not name.endswith("bias")}
    found = assemble([outcome.state for outcome in outcomes], state_like(weights))
    assert all(is_close(found[f"model.{name}"], weight) for name, weight in weights.items())


@pytest.mark.parametrize(
    ("name", "sizes", "more"),
    [
        ("zb-h2", {"tp": 2, "pp": 2}, {}),
        pytest.param("gpipe", {"ep": 2, "cp": 2}, {}, marks=slow),
        pytest.param("1f1b", {"dp": 2, "ep": 2}, {"memory_options": MemoryOptions(zero=3)}, marks=slow),
        pytest.param("zb-h2", {"pp": 4}, {"post_validation": True}, marks=slow),
    ],
)
def test_router_biases_that_do_not_move_stay_and_count(fleet, corpus, tmp_path, name, sizes, more):
    """A step after three that moved them has the loss of one process on any mesh, and saves them unchanged."""
    moving = FAMILIES["deepseek-v3"]
    assert moving.experts is not None
    model = replace(moving, experts=replace(moving.experts, bias_update_rate=0.0))
    before, after = checkpoint.folder_of(tmp_path, 3), checkpoint.folder_of(tmp_path, 4)
    run_and_save(fleet, shallow_plan(corpus, "gpipe", {}, model=moving), 3, before)
    plan = shallow_plan(corpus, name, sizes, model=model, **more)
    outcomes = fleet.run(plan, [(3, 1)], restore=str(before), save=str(after))
    commit(after, 4, [entry for outcome in outcomes for entry in outcome.shards])
    alone = plan_of("gpipe", 1, 1, plan.batch.global_batch_size // 2, corpus, model=model)
    losses = [losses_of(each).values() for each in (outcomes, fleet.run(alone, [(3, 1)], restore=str(before)))]
    assert sum(losses[0]) == pytest.approx(sum(losses[1]), rel=1e-10)
    names = [f"model.layers.{layer}.experts.bias" for layer in (1, 2, 3)]
    was, now = (read(checkpoint.open_checkpoint(folder), names) for folder in (before, after))
    assert not [name for name in names if not torch.equal(now[name], was[name])]
    assert all(was[name].any() for name in names)


@slow
@pytest.mark.parametrize("family", ["deepseek-v3", "mixtral"])  # with biases that balance the load, and without
@pytest.mark.parametrize(
    ("name", "sizes"),
    [("zb-h2", {"tp": 2, "pp": 2}), ("dualpipe", {"ep": 2, "pp": 2}), ("1f1b", {"dp": 2, "cp": 2})],
)
def test_the_reported_load_of_experts_is_that_of_one_process(fleet, corpus, family, name, sizes):
    """Every token is counted at each of its experts once, whichever rank has them. One step in ten is reported."""
    model = FAMILIES[family]
    assert model.experts is not None
    plan = shallow_plan(corpus, name, sizes, model=model)
    alone = plan_of("gpipe", 1, 1, plan.batch.global_batch_size // 2, corpus, model=plan.model)
    found = []
    for outcomes in (fleet.run(plan, [(0, 11)]), fleet.run(alone, [(0, 11)])):
        assert {each.step for outcome in outcomes for each in outcome.results if each.expert_load} == {0, LOAD_EVERY}
        found.append(total_load(outcome.results[0].expert_load for outcome in outcomes))
    assert found[0] == found[1] and list(found[0]) == list(range(model.experts.first_k_dense, plan.model.layers))
    assert {sum(load) for load in found[0].values()} == {plan.batch.tokens * model.experts.top_k}
