"""Law 1 for every optimizer: on any mesh, the weights of one process with torch.optim.AdamW or a float64 Muon."""

from __future__ import annotations

import signal
from dataclasses import replace
from typing import Any

import pytest
import reference_families
import torch
from bits import same_bits
from exactness import assert_equals_one_process, state_like
from fleet import assemble
from plans import global_batches, is_close, plan_on_mesh
from reference_model import train
from resume import assert_repeatable, run_and_save, save_and_resume
from small_models import FAMILIES, HEADS, MOE
from worker_processes import check_recovery

from pentad.schedules.spec.learning_rate import LearningRate
from pentad.schedules.spec.optimizer import OptimizerSpec, ParamGroup
from pentad.schedules.spec.plan import Plan
from pentad.schedules.spec.schedule_spec import MemoryOptions
from pentad.schedules.spec.tensors import tensors
from pentad.workers.checkpoint import checkpoint, shards
from pentad.workers.params.param_init import initial_values
from pentad.workers.params.sharded_state import TensorAssembly

slow = pytest.mark.slow
ADAMW = OptimizerSpec(LearningRate(1e-2, 1e-3, 2, 3), 0.9, 0.95, 1e-8, 0.1, clip_norm=0.5)
MUON = replace(ADAMW, name="muon")
ORIGINAL = replace(MUON, adjust_lr_fn="original", nesterov=False, momentum=0.8, clip_norm=None)
GROUPS = (
    ParamGroup("embedding", learning_rate_scale=0.5),
    ParamGroup("layers.*.attention.*", learning_rate_scale=2.0, weight_decay=0.0),
    ParamGroup("*norm", weight_decay=0.3),
)


def plan_with(corpus: str, optimizer: OptimizerSpec, name: str, sizes: dict[str, int], **more: Any) -> Plan:
    return replace(plan_on_mesh(corpus, name, sizes, **more), optimizer=optimizer)


DENSE: list[Any] = [
    pytest.param("gpipe", {}, 0, marks=slow),
    pytest.param("zb-h2", {"tp": 2, "pp": 2}, 0, marks=slow),
    ("1f1b", {"tp": 2, "dp": 2}, 3),
    pytest.param("dualpipev", {"pp": 2, "dp": 2}, 0, marks=slow),
    pytest.param("dualpipe", {"pp": 2, "tp": 2}, 1, marks=slow),
    pytest.param("1f1b", {"tp": 4}, 0, marks=slow),
    pytest.param("1f1b", {"cp": 2, "dp": 2}, 1, marks=slow),
    pytest.param("zb-v", {"pp": 2, "dp": 2}, 2, marks=slow),
]


@pytest.mark.parametrize(("name", "sizes", "zero"), DENSE)
def test_muon_on_dense_models(fleet, corpus, name, sizes, zero):
    model, optimizer = replace(HEADS, layers=4), replace(MUON, groups=GROUPS) if zero == 3 else MUON
    plan = plan_with(corpus, optimizer, name, sizes, model=model, memory_options=MemoryOptions(zero=zero))
    assert_equals_one_process(fleet, plan)


EXPERTS: list[Any] = [
    ("moe", "1f1b", {"ep": 2, "tp": 2}, 0),
    pytest.param("moe", "gpipe", {"ep": 4}, 0, marks=slow),
    pytest.param("moe", "1f1b", {"ep": 2, "dp": 2}, 3, marks=slow),
    pytest.param("moe", "dualpipe", {"ep": 2, "pp": 2}, 1, marks=slow),
    pytest.param("moe", "zb-h2", {"pp": 2, "cp": 2}, 0, marks=slow),
    pytest.param("deepseek-v3", "zb-h2", {"tp": 2, "pp": 2}, 0, marks=slow),
    pytest.param("deepseek-v3", "1f1b", {"ep": 2, "cp": 2}, 2, marks=slow),
    pytest.param("qwen3-moe", "1f1b", {"tp": 4}, 0, marks=slow),
]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "name", "sizes", "zero"), EXPERTS)
def test_muon_on_experts(fleet, corpus, family, name, sizes, zero):
    model = replace(MOE, layers=4) if family == "moe" else FAMILIES[family]
    options = MemoryOptions(zero=zero)
    assert_equals_one_process(fleet, plan_with(corpus, MUON, name, sizes, model=model, memory_options=options))


@pytest.mark.parametrize(
    "optimizer",
    [
        pytest.param(replace(MUON, groups=GROUPS, clip_norm=None), marks=slow),
        pytest.param(ORIGINAL, marks=slow),
        pytest.param(replace(ADAMW, groups=GROUPS), marks=slow),
        pytest.param(replace(ADAMW, clip_norm=None), marks=slow),
    ],
    ids=["muon groups", "muon original", "adamw groups", "adamw without clipping"],
)
def test_options_of_the_optimizer(fleet, corpus, optimizer):
    sizes, options = {"tp": 2, "dp": 2}, MemoryOptions(zero=1)
    assert_equals_one_process(fleet, plan_with(corpus, optimizer, "1f1b", sizes, memory_options=options))


POST_VALIDATED: list[Any] = [
    ("zb-h2", {"pp": 2, "tp": 2}, 0, 0.5),
    pytest.param("zb-h2", {"pp": 4}, 0, 100.0, marks=slow),
    pytest.param("zb-h2", {"pp": 2, "dp": 2}, 3, 0.5, marks=slow),
    pytest.param("dualpipev", {"pp": 2, "tp": 2}, 0, 0.5, marks=slow),
    pytest.param("dualpipe", {"pp": 2, "dp": 2}, 1, 0.5, marks=slow),
    pytest.param("zb-v", {"pp": 2, "cp": 2}, 2, None, marks=slow),
    pytest.param("1f1b", {"pp": 2, "dp": 2}, 1, 100.0, marks=slow),
]


@pytest.mark.parametrize(("name", "sizes", "zero", "clip_norm"), POST_VALIDATED)
def test_muon_with_post_validation(fleet, corpus, name, sizes, zero, clip_norm):
    """Steps that are clipped are orthogonalized again; those within the limit are not."""
    model, optimizer = replace(HEADS, layers=4), replace(MUON, clip_norm=clip_norm)
    options = {"model": model, "memory_options": MemoryOptions(zero=zero), "post_validation": True}
    assert_equals_one_process(fleet, plan_with(corpus, optimizer, name, sizes, **options))


@slow
@pytest.mark.parametrize(("name", "sizes"), [("zb-h2", {"pp": 2, "ep": 2}), ("dualpipev", {"pp": 2, "ep": 2})])
def test_muon_on_experts_with_post_validation(fleet, corpus, name, sizes):
    model = replace(FAMILIES["mixtral"], layers=4)
    assert_equals_one_process(fleet, plan_with(corpus, MUON, name, sizes, model=model, post_validation=True))


@slow
@pytest.mark.parametrize("clip_norm", [0.5, 100.0])
def test_muon_with_post_validation_repeats_and_resumes_bit_identically(fleet, corpus, tmp_path, clip_norm):
    model, optimizer = replace(HEADS, layers=4), replace(MUON, clip_norm=clip_norm)
    plan = plan_with(corpus, optimizer, "zb-h2", {"pp": 2, "tp": 2}, model=model, post_validation=True, dtype="float32")
    assert_repeatable(fleet, plan, tmp_path)


@slow
@pytest.mark.timeout(150)
@pytest.mark.parametrize("clip_norm", [0.5, 100.0])
@pytest.mark.parametrize("sizes", [{"pp": 2, "dp": 2}, {"dp": 2, "tp": 2}])
def test_muon_with_post_validation_that_loses_a_rank_ends_with_the_same_bits(workers, corpus, sizes, clip_norm):
    model, optimizer = replace(HEADS, layers=4), replace(MUON, clip_norm=clip_norm)
    plan = plan_with(corpus, optimizer, "zb-h2", sizes, model=model, post_validation=True, dtype="float32")
    check_recovery(workers, plan, 16, signal.SIGKILL)


@slow
@pytest.mark.parametrize("tied", [False, True])
def test_muon_with_copies_of_the_embedding(fleet, corpus, tied):
    model = replace(FAMILIES["deepseek-v3"], mtp_layers=2, tie_word_embeddings=tied)
    assert_equals_one_process(fleet, plan_with(corpus, MUON, "zb-v", {"pp": 2, "tp": 2}, model=model))


@slow
def test_clipping_can_be_off_with_post_validation(fleet, corpus):
    plan = plan_with(corpus, replace(ADAMW, clip_norm=None), "zb-h2", {"pp": 2}, post_validation=True)
    assert_equals_one_process(fleet, plan)


def narrow_plan(corpus: str, zero: int, sizes: dict[str, int], optimizer: OptimizerSpec) -> Plan:
    options = MemoryOptions(zero=zero)
    model = replace(MOE, layers=2)
    return plan_with(corpus, optimizer, "1f1b", sizes, model=model, dtype="float32", memory_options=options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("zero", "optimizer"),
    [
        (1, replace(MUON, bf16_state=True)),
        pytest.param(3, MUON, marks=slow),
        pytest.param(0, MUON, marks=slow),
        pytest.param(2, replace(ADAMW, bf16_state=True), marks=slow),
    ],
)
def test_stopped_and_resumed_runs_have_the_same_bits(fleet, corpus, tmp_path, zero, optimizer):
    plan = narrow_plan(corpus, zero, {"tp": 2, "dp": 2}, optimizer)
    once = fleet.run(plan, [(0, 4)])
    resumed = save_and_resume(fleet, plan, checkpoint.folder_of(tmp_path, 2), 2, [(2, 2)])
    for one, other in zip(once, resumed, strict=True):
        assert same_bits(one.state, other.state)
        kinds = {name.rpartition("layers")[0] for name in one.state if "attention.qkv" in name}
        assert ("optimizer.momentum." in kinds) == (optimizer.name == "muon")
        narrow = {value.dtype for name, value in one.state.items() if name.startswith("optimizer.")}
        assert narrow == {torch.bfloat16 if optimizer.bf16_state else torch.float32}


@pytest.mark.parametrize("zero", [3, pytest.param(0, marks=slow)])
def test_state_moves_to_any_mesh_and_only_a_changed_optimizers_is_dropped(fleet, corpus, tmp_path, zero):
    before = narrow_plan(corpus, zero, {"ep": 2, "dp": 2}, MUON)
    folder = checkpoint.folder_of(tmp_path, 2)
    run_and_save(fleet, before, 2, folder)
    opened = checkpoint.open_checkpoint(folder)
    stored = shards.read(opened, opened.tensors)
    like = {name: tensor for name, tensor in full_tensors(stored).items() if not name.endswith(".bias")}
    after = narrow_plan(corpus, 1, {"tp": 2, "pp": 2, "dp": 1}, MUON)
    moved = assemble([outcome.state for outcome in fleet.run(after, [(2, 0)], restore=str(folder))], like)
    assert same_bits(moved, like)
    changed = replace(after, optimizer=ADAMW)
    outcomes = fleet.run(changed, [(2, 0)], restore=str(folder))
    zeros = {
        f"optimizer.{k}.{name[19:]}": t
        for name, t in like.items()
        if name.startswith("optimizer.momentum.")
        for k in "mv"
    }
    found = assemble([outcome.state for outcome in outcomes], like | zeros)
    assert all(not found[name].any() for name in zeros)
    assert all(torch.equal(found[name], like[name]) for name in found.keys() - zeros.keys())


@pytest.mark.parametrize(
    ("name", "sizes", "zero"),
    [pytest.param("1f1b", {"tp": 2, "dp": 2}, 1, marks=slow), ("zb-h2", {"pp": 2}, 0)],
)
def test_moments_of_another_run_are_corrected_by_all_their_updates(fleet, corpus, tmp_path, name, sizes, zero):
    """As torch counts them, whatever the step at which the new run takes them over."""
    constant = replace(ADAMW, learning_rate=LearningRate(1e-2, 1e-2, 0, 1, "constant"))
    options = {"model": replace(HEADS, layers=4), "memory_options": MemoryOptions(zero=zero)}
    plan = plan_with(corpus, constant, name, sizes, **options, post_validation=name == "zb-h2")
    folder = checkpoint.folder_of(tmp_path, 2)
    run_and_save(fleet, plan, 2, folder)
    stage = replace(plan, optimizer=replace(constant, moment_offset=2))
    outcomes = fleet.run(stage, [(0, 1)], restore=str(folder))
    first, second = global_batches(plan, steps=2)
    *_, weights = train(plan, [first, second, first])
    found = assemble([outcome.state for outcome in outcomes], state_like(weights))
    for each, weight in weights.items():
        assert is_close(found[f"model.{each}"], weight), each


def full_tensors(stored: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint, whatever parts they were stored in."""
    parts: dict[str, list[str]] = {}
    for key in stored:
        parts.setdefault(key.partition("@")[0], []).append(key)
    found = {}
    for name, keys in parts.items():
        ends = [[int(dim.rpartition("-")[2]) for dim in key.partition("@")[2].split(",")] for key in keys if "@" in key]
        shape = tuple(map(max, zip(*ends, strict=True))) if ends else tuple(stored[name].shape)
        assembly = TensorAssembly(shape)
        for key in keys:
            assembly.add(stored[key], key)
        found[name] = assembly.tensor
    return found


Z_LOSS: list[Any] = [
    ("gpipe", {"tp": 2}, {}),
    pytest.param("zb-h2", {"tp": 2, "pp": 2}, {"recompute": "full"}, marks=slow),
    pytest.param("1f1b", {"cp": 2, "dp": 2}, {}, marks=slow),
    pytest.param("seq-1f1b", {"pp": 2}, {"slices": 2}, marks=slow),
    pytest.param("dualpipe", {"pp": 2, "dp": 2}, {}, marks=slow),
    pytest.param("dualpipev", {"pp": 2, "cp": 2}, {}, marks=slow),
    pytest.param("1f1b", {"dp": 4}, {"memory_options": MemoryOptions(zero=3)}, marks=slow),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "sizes", "more"), Z_LOSS)
def test_the_z_loss_trains_and_is_no_part_of_the_loss(fleet, corpus, name, sizes, more):
    plan = plan_with(corpus, replace(ADAMW, z_loss=0.1), name, sizes, model=replace(HEADS, layers=4), **more)
    assert_equals_one_process(fleet, plan)
    outcomes = fleet.run(plan, [(0, 1)])
    found = {outcome.results[0].squared_lse for outcome in outcomes}
    assert len(found) == 1
    assert found.pop() / plan.batch.tokens == pytest.approx(reference_squared_lse(plan), rel=1e-10)


def reference_squared_lse(plan: Plan) -> float:
    """The mean squared logsumexp over the first batch, with the initial weights."""
    found = [each for each in tensors(plan.model) if not each.tied_to]
    p = {each.name: initial_values(each, plan.seed).double() for each in found}
    return reference_families.losses(plan.model, p, *global_batches(plan)[0]).squared_lse.item()


@slow
def test_the_z_loss_with_post_validation(fleet, corpus):
    plan = plan_with(corpus, replace(ADAMW, z_loss=0.1), "zb-h2", {"pp": 2}, post_validation=True)
    assert_equals_one_process(fleet, plan)
