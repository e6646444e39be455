"""LoRA under every schedule and mesh: the losses and adapters of one process, which uses W + alpha / rank B A."""

from __future__ import annotations

import signal
from dataclasses import replace
from typing import Any

import pytest
import torch
from exactness import assert_equals_one_process, state_like
from fleet import assemble, losses_of
from plans import is_close, plan_on_mesh, reference
from resume import assert_repeatable, commit, run_and_save
from small_models import FAMILIES, HEADS
from worker_processes import check_recovery

from pentad.schedules.compiler import compile_program
from pentad.schedules.spec.lora import EXPERTS, FUSED, SEPARATE, LoraSpec, targets_of
from pentad.schedules.spec.plan import Plan
from pentad.schedules.spec.schedule_spec import MemoryOptions
from pentad.workers.checkpoint import checkpoint
from pentad.workers.params.frozen import frozen_weights

slow = pytest.mark.slow
ALL = LoraSpec(rank=3, alpha=6.0, targets=SEPARATE)
ATTENTION = LoraSpec(rank=2, alpha=4.0, targets=("q_proj", "v_proj", "o_proj"))
DENSE, ROUTED = replace(HEADS, layers=4), replace(FAMILIES["qwen3-moe"], layers=4)


def plan_with(corpus: str, lora: LoraSpec, name: str, sizes: dict[str, int], **more: Any) -> Plan:
    return plan_on_mesh(corpus, name, sizes, lora=lora, **more)


MESHES: list[Any] = [
    ("zb-h2", {"pp": 2, "tp": 2}, {}),
    ("zb-v", {"pp": 2, "dp": 2}, {"zero": 3, "max_gathered": 1}),
    pytest.param("gpipe", {}, {}, marks=slow),
    pytest.param("zb-v", {"pp": 2, "dp": 2}, {"zero": 2}, marks=slow),
    pytest.param("dualpipev", {"pp": 2, "dp": 2}, {"zero": 1}, marks=slow),
    pytest.param("dualpipe", {"pp": 2, "tp": 2}, {}, marks=slow),
    pytest.param("1f1b", {"tp": 4}, {}, marks=slow),
    pytest.param("1f1b", {"cp": 2, "dp": 2}, {"zero": 2}, marks=slow),
    pytest.param("zb-h2", {"pp": 2, "cp": 2}, {}, marks=slow),
    pytest.param("gpipe", {"dp": 2}, {"zero": 3}, marks=slow),
    pytest.param("zb-h2", {"pp": 2, "dp": 2}, {"zero": 3}, marks=slow),
    pytest.param("1f1b", {"tp": 2, "dp": 2}, {"zero": 3}, marks=slow),
    pytest.param("dualpipev", {"pp": 2, "cp": 2}, {"zero": 3}, marks=slow),
    pytest.param("dualpipe", {"pp": 4}, {"zero": 3}, marks=slow),
]


@pytest.mark.parametrize(("name", "sizes", "options"), MESHES)
def test_adapters_equal_those_of_one_process(fleet, corpus, name, sizes, options):
    plan = plan_with(corpus, ALL, name, sizes, model=DENSE, memory_options=MemoryOptions(**options))
    assert_equals_one_process(fleet, plan, check_bytes=True)


FAMILY_CASES: list[Any] = [
    pytest.param("qwen3-moe", "1f1b", {"ep": 2, "tp": 2}, 0, marks=slow),
    pytest.param("gpt-oss", "zb-h2", {"ep": 2, "pp": 2}, 0, marks=slow),
    pytest.param("mixtral", "1f1b", {"ep": 4}, 0, marks=slow),
    pytest.param("mixtral", "zb-v", {"ep": 2, "pp": 2}, 3, marks=slow),
    pytest.param("qwen3-moe", "1f1b", {"ep": 2, "dp": 2}, 3, marks=slow),
    pytest.param("qwen3", "zb-h2", {"pp": 2, "tp": 2}, 0, marks=slow),
    pytest.param("gemma2", "1f1b", {"pp": 2, "tp": 2}, 0, marks=slow),
    pytest.param("olmo2", "1f1b", {"tp": 4}, 0, marks=slow),
    pytest.param("qwen2", "1f1b", {"tp": 4}, 0, marks=slow),
]


@pytest.mark.parametrize(("family", "name", "sizes", "zero"), FAMILY_CASES)
def test_attention_has_adapters_in_every_family(fleet, corpus, family, name, sizes, zero):
    model, options = replace(FAMILIES[family], layers=4), MemoryOptions(zero=zero)
    plan = plan_with(corpus, ATTENTION, name, sizes, model=model, memory_options=options)
    assert_equals_one_process(fleet, plan, check_bytes=True)


LATENT_CASES: list[Any] = [
    ("deepseek-v3", "zb-h2", {"pp": 2, "tp": 2}, 0),
    pytest.param("deepseek-v3", "dualpipev", {"pp": 2, "ep": 2}, 1, marks=slow),
    pytest.param("deepseek-v3", "zb-h2", {"pp": 2, "cp": 2}, 0, marks=slow),
    pytest.param("deepseek-v3", "1f1b", {"ep": 2, "tp": 2}, 0, marks=slow),
    pytest.param("deepseek-v3", "zb-v", {"pp": 2, "dp": 2}, 3, marks=slow),
    pytest.param("deepseek-v3", "dualpipev", {"pp": 2, "ep": 2}, 3, marks=slow),
    pytest.param("deepseek-v3", "gpipe", {"dp": 2}, 2, marks=slow),
    pytest.param("deepseek-v2-lite", "zb-h2", {"pp": 2, "tp": 2}, 0, marks=slow),
    pytest.param("deepseek-v2-lite", "dualpipev", {"pp": 2, "cp": 2}, 3, marks=slow),
    pytest.param("deepseek-v2-lite", "1f1b", {"tp": 4}, 0, marks=slow),
]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "name", "sizes", "zero"), LATENT_CASES)
def test_latent_attention_and_experts_have_adapters(fleet, corpus, family, name, sizes, zero):
    assert_equals_one_process(fleet, adapted(corpus, family, name, sizes, zero), check_bytes=True)


EXPERT_CASES: list[Any] = [
    ("qwen3-moe", "zb-h2", {"pp": 2, "ep": 2}, 0),
    pytest.param("qwen3-moe", "1f1b", {"ep": 2, "tp": 2}, 0, marks=slow),
    pytest.param("mixtral", "dualpipev", {"pp": 2, "tp": 2}, 0, marks=slow),
    pytest.param("mixtral", "zb-v", {"ep": 2, "pp": 2}, 3, marks=slow),
    pytest.param("mixtral", "1f1b", {"ep": 2, "dp": 2}, 3, marks=slow),
    pytest.param("mixtral", "1f1b", {"ep": 2, "cp": 2}, 2, marks=slow),
    pytest.param("gpt-oss", "zb-h2", {"ep": 2, "tp": 2}, 0, marks=slow),
    pytest.param("gpt-oss", "dualpipe", {"pp": 4}, 3, marks=slow),
]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "name", "sizes", "zero"), EXPERT_CASES)
def test_experts_have_adapters(fleet, corpus, family, name, sizes, zero):
    assert_equals_one_process(fleet, adapted(corpus, family, name, sizes, zero), check_bytes=True)


@slow
@pytest.mark.parametrize("targets", [EXPERTS, EXPERTS[:1], EXPERTS[1:]])
def test_adapters_of_experts_alone(fleet, corpus, targets):
    """Then some layers have no adapters."""
    plan = adapted(corpus, "deepseek-v3", "zb-h2", {"pp": 2, "ep": 2}, 1)
    lora = LoraSpec(rank=3, alpha=6.0, targets=targets)
    assert_equals_one_process(fleet, replace(plan, lora=lora))


def adapted(corpus: str, family: str, name: str, sizes: dict[str, int], zero: int, **more: Any) -> Plan:
    """A plan with adapters everywhere and fixed routing biases."""
    model = replace(FAMILIES[family], layers=4)
    if model.experts is not None:
        model = replace(model, experts=replace(model.experts, bias_update_rate=0.0))
    lora = LoraSpec(rank=3, alpha=6.0, targets=targets_of(model))
    return plan_with(corpus, lora, name, sizes, model=model, memory_options=MemoryOptions(zero=zero), **more)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "sizes", "zero"),
    [
        ("1f1b", {"pp": 2, "tp": 2}, 0),
        pytest.param("zb-h2", {"pp": 2, "cp": 2}, 0, marks=slow),
        pytest.param("dualpipev", {"pp": 2, "tp": 2}, 1, marks=slow),
        pytest.param("1f1b", {"tp": 4}, 0, marks=slow),
        pytest.param("zb-v", {"pp": 2, "dp": 2}, 3, marks=slow),
        pytest.param("gpipe", {}, 0, marks=slow),
    ],
)
def test_one_adapter_serves_projections_that_are_one_module(fleet, corpus, name, sizes, zero):
    lora = LoraSpec(rank=3, alpha=6.0, targets=FUSED)
    plan = plan_with(corpus, lora, name, sizes, model=DENSE, memory_options=MemoryOptions(zero=zero))
    assert_equals_one_process(fleet, plan, check_bytes=True)


@slow
@pytest.mark.parametrize("mode", ["selective", "attention", "full"])
def test_recomputed_latents_and_experts_have_adapters(fleet, corpus, mode):
    plan = adapted(corpus, "deepseek-v3", "1f1b", {"pp": 2, "tp": 2}, 0, recompute=mode)
    assert_equals_one_process(fleet, plan)
    assert_equals_one_process(fleet, adapted(corpus, "deepseek-v3", "zb-v", {"pp": 2, "ep": 2}, 3, recompute=mode))


@slow
@pytest.mark.parametrize("mode", ["selective", "full"])
def test_recomputed_layers_have_adapters(fleet, corpus, mode):
    plan = plan_with(corpus, ALL, "1f1b", {"pp": 2, "tp": 2}, model=DENSE, recompute=mode)
    assert_equals_one_process(fleet, plan)
    options = MemoryOptions(zero=3, max_gathered=1)
    plan = plan_with(corpus, ALL, "zb-v", {"pp": 2, "dp": 2}, model=DENSE, recompute=mode, memory_options=options)
    assert_equals_one_process(fleet, plan)


@slow
def test_post_validation_steps_adapters(fleet, corpus):
    assert_equals_one_process(fleet, plan_with(corpus, ALL, "zb-h2", {"pp": 4}, model=DENSE, post_validation=True))
    sizes, options = {"pp": 2, "dp": 2}, MemoryOptions(zero=3)
    plan = plan_with(corpus, ALL, "zb-h2", sizes, model=DENSE, post_validation=True, memory_options=options)
    assert_equals_one_process(fleet, plan)


@slow
@pytest.mark.parametrize(
    ("name", "sizes", "zero", "model"),
    [
        ("zb-h2", {"pp": 2, "tp": 2}, 0, DENSE),
        ("zb-v", {"pp": 2, "dp": 2}, 2, DENSE),
        ("zb-v", {"pp": 2, "dp": 2}, 3, DENSE),
        ("dualpipev", {"pp": 2, "cp": 2}, 3, DENSE),
        ("1f1b", {"tp": 2, "dp": 2}, 1, DENSE),
        ("dualpipe", {"pp": 4}, 0, DENSE),
        ("zb-h2", {"pp": 2, "ep": 2}, 0, ROUTED),
        ("dualpipev", {"pp": 2, "ep": 2}, 3, ROUTED),
        ("1f1b", {"ep": 2, "tp": 2}, 1, ROUTED),
    ],
)
def test_runs_with_adapters_repeat_and_resume_bit_identically(fleet, corpus, tmp_path, name, sizes, zero, model):
    options, lora = MemoryOptions(zero=zero), ATTENTION if model.experts else ALL
    plan = plan_with(corpus, lora, name, sizes, model=model, memory_options=options, dtype="float32")
    assert_repeatable(fleet, plan, tmp_path)


@slow
@pytest.mark.parametrize(
    ("name", "sizes", "zero"),
    [
        ("zb-h2", {"pp": 2, "tp": 2}, 0),
        ("dualpipev", {"pp": 2, "ep": 2}, 3),
        ("1f1b", {"ep": 2, "tp": 2}, 1),
        ("zb-v", {"pp": 2, "cp": 2}, 2),
    ],
)
def test_adapters_of_latents_and_experts_repeat_and_resume_bit_identically(fleet, corpus, tmp_path, name, sizes, zero):
    assert_repeatable(fleet, adapted(corpus, "deepseek-v3", name, sizes, zero, dtype="float32"), tmp_path)


@slow
@pytest.mark.parametrize(("name", "sizes", "zero"), [("1f1b", {"ep": 2, "tp": 2}, 1), ("zb-h2", {"pp": 2, "ep": 2}, 3)])
def test_muon_updates_adapters(fleet, corpus, name, sizes, zero):
    plan = adapted(corpus, "deepseek-v3", name, sizes, zero)
    assert_equals_one_process(fleet, replace(plan, optimizer=replace(plan.optimizer, name="muon")))


RECOVERIES: list[Any] = [
    pytest.param("dualpipe", {"pp": 4}, signal.SIGKILL, marks=slow),
    pytest.param("zb-h2", {"dp": 2, "pp": 2}, signal.SIGSTOP, marks=slow),
    pytest.param("1f1b", {"dp": 2, "tp": 2}, signal.SIGKILL, marks=slow),
]


@pytest.mark.timeout(150)
@pytest.mark.parametrize(("name", "sizes", "fault"), RECOVERIES)
def test_a_run_with_adapters_that_loses_a_rank_ends_with_the_same_bits(workers, corpus, name, sizes, fault):
    check_recovery(workers, plan_with(corpus, ALL, name, sizes, model=DENSE, dtype="float32"), 16, fault)


def test_a_mesh_that_shrinks_or_grows_cuts_frozen_weights_anew(corpus):
    """Shards that do not change are kept, and all shards together are the full weights."""
    options, cpu = MemoryOptions(zero=3), torch.device("cpu")
    large = plan_with(corpus, ALL, "zb-v", {"pp": 2, "dp": 2}, model=DENSE, memory_options=options)
    small = plan_with(corpus, ALL, "zb-v", {"pp": 2}, model=DENSE)
    held = [frozen_weights(large, rank, cpu) for rank in range(large.mesh.size)]
    kept = frozen_weights(large, 0, cpu, (large, held[0]))
    assert kept.keys() == held[0].keys() and all(kept[shard] is each for shard, each in held[0].items())
    for rank in range(small.mesh.size):
        shrunk = frozen_weights(small, rank, cpu, (large, held[rank]))
        for shard, weights in shrunk.items():
            parts = torch.cat([held[holder][shard].compute for holder in large.holders(shard)])
            assert torch.equal(parts[: large.size(shard)], weights.compute)
        grown = frozen_weights(large, rank, cpu, (small, shrunk))
        assert all(torch.equal(grown[shard].compute, held[rank][shard].compute) for shard in grown)


@slow
def test_a_checkpoint_of_adapters_resumes_on_other_meshes(fleet, corpus, tmp_path):
    """In float64, on a smaller mesh and a larger one again, with the losses and weights of one process."""
    options = MemoryOptions(zero=3, max_gathered=1)
    large = plan_with(corpus, ALL, "zb-v", {"pp": 2, "dp": 2}, model=DENSE, memory_options=options)
    small = plan_with(corpus, ALL, "1f1b", {"pp": 2}, model=DENSE)
    batch = replace(small.batch, global_batch_size=large.batch.global_batch_size, microbatches=8)
    small = replace(small, program=compile_program("1f1b", 2, 8), batch=batch)
    losses, _, _, weights = reference(large)
    folders = [checkpoint.folder_of(tmp_path, step) for step in (1, 2)]
    runs = [run_and_save(fleet, large, 1, folders[0])]
    runs.append(fleet.run(small, [(1, 1)], restore=str(folders[0]), save=str(folders[1])))
    commit(folders[1], 2, [entry for outcome in runs[1] for entry in outcome.shards])
    runs.append(fleet.run(large, [(2, 1)], restore=str(folders[1])))
    for expected, outcomes in zip(losses, runs, strict=True):
        assert sum(losses_of(outcomes).values()) / large.batch.tokens == pytest.approx(expected, rel=1e-10)
    state = assemble([outcome.state for outcome in runs[2]], state_like(weights))
    for name, weight in weights.items():
        assert is_close(state[f"model.{name}"], weight), name
