"""Law 1 on meshes of more than two axes: the loss, the gradients and the weights of one process."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from axes_cases import FAMILIES, HEADS, MIXED, ROUTED, equals_one_process, like, made
from fleet import assembled, losses_of
from plans import MODEL, close, plan_of, reference

from pentad.schedules.spec.schedule_spec import MemoryOptions
from pentad.workers.checkpoint import checkpoint
from pentad.workers.checkpoint.manifest import Shard

SLOW = pytest.mark.slow
PREDICTED = [
    pytest.param("gpipe", {}, False, marks=SLOW),
    pytest.param("zb-h2", {"pp": 4}, False, marks=SLOW),
    ("1f1b", {"pp": 2, "tp": 2}, True),
    ("dualpipe", {"pp": 2, "ep": 2}, False),
    pytest.param("zb-v", {"pp": 2, "cp": 2}, True, marks=SLOW),
]
OF_FAMILIES = [
    *((name, "gpipe", {}) for name in FAMILIES),
    pytest.param("llama 3.1", "zb-h2", {"pp": 2, "cp": 2}, marks=SLOW),
    ("qwen3", "zb-h2", {"tp": 4}),
    pytest.param("qwen3", "1f1b", {"tp": 2, "pp": 2}, marks=SLOW),
    pytest.param("qwen3-moe", "zb-v", {"ep": 2, "pp": 2}, marks=SLOW),
    pytest.param("mixtral", "1f1b", {"tp": 4}, marks=SLOW),
    ("deepseek-v3", "zb-h2", {"tp": 2, "pp": 2}),
    ("deepseek-v3", "1f1b", {"ep": 2, "cp": 2}),
    pytest.param("deepseek-v3", "dualpipe", {"pp": 2, "ep": 2}, marks=SLOW),
    pytest.param("deepseek-v2-lite", "1f1b", {"tp": 2, "cp": 2}, marks=SLOW),
]
TENSOR = [
    pytest.param("1f1b", {"tp": 2}, marks=SLOW),
    ("1f1b", {"tp": 4}),
    ("zb-h2", {"tp": 2, "pp": 2}),
    pytest.param("dualpipe", {"tp": 2, "pp": 2}, marks=SLOW),
    pytest.param("gpipe", {"tp": 2, "dp": 2}, marks=SLOW),
]
TIED = [
    pytest.param("gpipe", {"tp": 2}, 0, marks=SLOW),
    pytest.param("zb-h2", {"pp": 4}, 0, marks=SLOW),
    ("1f1b", {"pp": 2, "dp": 2}, 3),
    ("dualpipe", {"tp": 2, "pp": 2}, 0),
    pytest.param("dualpipe", {"pp": 4}, 1, marks=SLOW),
    pytest.param("zb-v", {"pp": 2, "tp": 2}, 0, marks=SLOW),
]
CONTEXT = [
    ("1f1b", {"cp": 2}, "ring"),
    ("zb-h2", {"cp": 2, "pp": 2}, "all_gather"),
    ("gpipe", {"cp": 2, "tp": 2}, "ulysses"),
    ("1f1b", {"cp": 4}, "ring"),
    pytest.param("1f1b", {"cp": 4}, "all_gather", marks=SLOW),
    pytest.param("dualpipe", {"cp": 2, "pp": 2}, "ring", marks=SLOW),
    pytest.param("1f1b", {"cp": 2, "dp": 2}, "ulysses", marks=SLOW),
]
EXPERTS = [
    pytest.param("gpipe", {}, 0, marks=SLOW),
    pytest.param("1f1b", {"ep": 2}, 0, marks=SLOW),
    ("1f1b", {"ep": 4}, 0),
    pytest.param("zb-h2", {"ep": 2, "pp": 2}, 0, marks=SLOW),
    ("dualpipe", {"ep": 2, "pp": 2}, 0),
    pytest.param("1f1b", {"ep": 2, "tp": 2}, 0, marks=SLOW),
    ("1f1b", {"ep": 2, "dp": 2}, 3),
    ("gpipe", {"ep": 2, "cp": 2}, 0),
]
SHARDED = [(3, {"tp": 2, "dp": 2})]


@pytest.mark.parametrize(("name", "sizes"), TENSOR)
def test_tensor_ranks_equal_one_process(fleet, corpus, name, sizes):
    equals_one_process(fleet, made(corpus, name, sizes))


@pytest.mark.parametrize(("zero", "sizes"), SHARDED)
def test_shards_of_tensor_ranks_equal_one_process(fleet, corpus, zero, sizes):
    equals_one_process(fleet, made(corpus, "1f1b", sizes, savings=MemoryOptions(zero=zero)))


@pytest.mark.parametrize("recompute", ["selective", pytest.param("full", marks=SLOW)])
def test_tensor_ranks_recompute_as_one_process(fleet, corpus, recompute):
    equals_one_process(fleet, made(corpus, "zb-h2", {"tp": 2, "pp": 2}, recompute=recompute))


@pytest.mark.parametrize(("name", "sizes", "zero"), TIED)
def test_tied_embeddings_equal_one_process(fleet, corpus, name, sizes, zero):
    tied = replace(MODEL, tie_word_embeddings=True)
    equals_one_process(fleet, made(corpus, name, sizes, model=tied, savings=MemoryOptions(zero=zero)))


@pytest.mark.parametrize("packed", [True, pytest.param(False, marks=SLOW)])
@pytest.mark.parametrize(("name", "sizes", "variant"), CONTEXT)
def test_context_ranks_equal_one_process(fleet, corpus, name, sizes, variant, packed):
    equals_one_process(fleet, made(corpus, name, sizes, model=HEADS, context=variant, packed=packed))


@pytest.mark.parametrize(("family", "name", "sizes"), OF_FAMILIES)
def test_every_family_equals_one_process(fleet, corpus, family, name, sizes):
    equals_one_process(fleet, made(corpus, name, sizes, model=FAMILIES[family]))


@pytest.mark.parametrize(("name", "sizes", "tied"), PREDICTED)
def test_layers_that_predict_further_tokens_equal_one_process(fleet, corpus, name, sizes, tied):
    model = replace(FAMILIES["deepseek-v3"], mtp_layers=2, tie_word_embeddings=tied)
    equals_one_process(fleet, made(corpus, name, sizes, model=model))


@pytest.mark.parametrize(("name", "sizes", "zero"), EXPERTS)
def test_experts_equal_one_process(fleet, corpus, name, sizes, zero):
    equals_one_process(fleet, made(corpus, name, sizes, model=MIXED, savings=MemoryOptions(zero=zero)))


MOVES = [
    ({"tp": 4}, {"ep": 2, "pp": 2}),
    ({"ep": 2, "dp": 2, "zero": 3}, {"tp": 2, "cp": 2}),
    pytest.param({"ep": 4}, {"tp": 2, "ep": 2}, marks=SLOW),
    pytest.param({"tp": 2, "pp": 2}, {"dp": 4, "zero": 2}, marks=SLOW),
]


@pytest.mark.parametrize(("before", "after"), MOVES)
def test_any_mesh_goes_on_from_what_another_saved(fleet, corpus, tmp_path, before, after):
    """With two steps before and one behind, as one process takes all three."""
    model = replace(FAMILIES["qwen3-moe"], tie_word_embeddings=True, experts=replace(ROUTED, first_k_dense=0))
    plans = []
    for sizes in (before, after):
        axes = {axis: size for axis, size in sizes.items() if axis != "zero"}
        replicas = axes.get("dp", 1) * axes.get("ep", 1)
        rest = {axis: size for axis, size in axes.items() if axis not in ("dp", "pp")}
        savings = MemoryOptions(zero=sizes.get("zero", 0))
        name = "zb-h2" if axes.get("pp") else "gpipe"
        plan = plan_of(
            name, axes.get("dp", 1), axes.get("pp", 1), 4 // replicas, corpus, **rest, model=model, savings=savings
        )
        plans.append(plan)
    folder = checkpoint.folder_of(tmp_path, 2)
    outcomes = fleet.run(plans[0], [(0, 2)], save=str(folder))
    shards = [Shard.from_plain(plain) for outcome in outcomes for plain in outcome.shards]
    checkpoint.commit(folder, step=2, shards=shards, meta={})
    losses, _, norms, weights = reference(plans[0])
    outcomes = fleet.run(plans[1], [(2, 1)], restore=str(folder))
    sums = losses_of(outcomes).values()
    assert sum(sums) / plans[1].batch.tokens == pytest.approx(losses[2], rel=1e-10)
    assert outcomes[0].results[0].grad_norm == pytest.approx(norms[2], rel=1e-10)
    kept = {f"model.{name}": weight for name, weight in weights.items() if not name.endswith("bias")}
    found = assembled([outcome.state for outcome in outcomes], like(kept) | moments(kept))
    assert all(close(found[name], weight) for name, weight in kept.items())


def moments(kept: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    names = ((kind, name.removeprefix("model.")) for kind in ("m", "v") for name in like(kept))
    return {f"optimizer.{kind}.{name}": like(kept)[f"model.{name}"] for kind, name in names}
