"""What the lora section refuses, each in one sentence, and the memory and traffic of plans with adapters."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from pentad.orchestrator.config.config import load
from pentad.orchestrator.planning.comm_volume import collective_bytes
from pentad.orchestrator.planning.estimate import costs_of, flops_per_token, memory
from pentad.orchestrator.planning.planning import make_plan
from pentad.orchestrator.run.init_from import with_base
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.spec.lora import EXPERTS, LATENT_ATTENTION, SEPARATE, LoraBase
from pentad.workers.checkpoint import checkpoint
from pentad.workers.checkpoint.atomic_io import write_file
from pentad.workers.checkpoint.manifest import Shard

LORA = ("lora.rank=4", "run.init_from=base")
ZERO_3 = ("zero.stage=3", "zero.max_gathered=1")
ATTENTION = "q_proj, k_proj, v_proj, o_proj"
MIXTRAL = ("model.family=mixtral", "model.experts.num_experts=4", "model.experts.top_k=2",
           "model.experts.intermediate_size=32")  # fmt: skip
DEEPSEEK = (*MIXTRAL[1:], "model.family=deepseek-v3", "model.kv_heads=8", "model.mla.kv_lora_rank=8",
            "model.mla.q_lora_rank=8", "model.mla.qk_nope_head_dim=8", "model.mla.qk_rope_head_dim=4",
            "model.mla.v_head_dim=8")  # fmt: skip
DEFAULTS = "lora.targets has 'q_proj', 'k_proj', 'v_proj'"
REFUSED = [
    ("lora.targets=[wq]", f"lora.targets has 'wq': expected some of {ATTENTION}, gate_proj, up_proj, down_proj"),
    ("lora.targets=[]", "lora.targets is []: expected at least one module"),
    ("lora.targets=[q_proj,q_proj]", "lora.targets is ['q_proj', 'q_proj']: expected each module once"),
    ("lora.rank=0", "lora.rank is 0: expected at least 1"),
    ("lora.alpha=0", "lora.alpha is 0: expected more than 0.0"),
    ("run.init_from=null", "run.init_from is null: expected the model that lora.rank = 4 trains adapters for"),
    ("run.init_step=true", "run.init_step is true: expected false with lora.rank, whose adapters begin anew"),
    ("model.family=phi3", f"{DEFAULTS}: expected some of qkv_proj, o_proj, gate_up_proj, down_proj"),
]


@pytest.mark.parametrize(("override", "sentence"), REFUSED)
def test_every_mistake_is_one_sentence(override: str, sentence: str) -> None:
    with pytest.raises(PentadError) as caught:
        load(None, [*LORA, override])
    assert str(caught.value) == sentence


def test_an_adapter_to_continue_needs_a_rank() -> None:
    with pytest.raises(PentadError, match=r"lora\.init_from is 'adapter': expected null without lora\.rank"):
        load(None, ["lora.init_from=adapter"])


def test_experts_have_adapters_by_the_names_of_their_weights() -> None:
    lora = load(None, [*LORA, *MIXTRAL, "lora.targets=all-linear"]).lora_spec
    assert lora is not None and lora.targets == (*SEPARATE[:4], *EXPERTS)
    expected = f"lora.targets has 'gate_proj': expected some of {ATTENTION}, {', '.join(EXPERTS)}"
    with pytest.raises(PentadError, match=expected):
        load(None, [*LORA, *MIXTRAL, "lora.targets=[q_proj,gate_proj]"])


def test_latent_attention_has_adapters_and_routing_biases_stay() -> None:
    lora = load(None, [*LORA, *DEEPSEEK, "lora.targets=all-linear"]).lora_spec
    assert lora is not None and lora.targets == (*LATENT_ATTENTION, *EXPERTS)
    for override, sentence in (
        ("lora.targets=[q_proj]", f"lora.targets has 'q_proj': expected some of {', '.join(lora.targets)}"),
        ("model.experts.bias_update_rate=0.001", "model.experts.bias_update_rate is 0.001: expected 0 with lora.rank"),
        ("model.mtp_layers=1", "model.mtp_layers is 1: expected 0 with lora.rank"),
    ):
        with pytest.raises(PentadError, match=re.escape(sentence)):
            load(None, [*LORA, *DEEPSEEK, "lora.targets=all-linear", override])


def test_all_linear_stands_for_every_module() -> None:
    assert load(None, [*LORA, "lora.targets=all-linear"]).lora == load(None, [*LORA, "lora.targets=[all-linear]"]).lora


def test_the_modules_of_phi3_are_fused() -> None:
    lora = load(None, [*LORA, "model.family=phi3", "lora.targets=all-linear"]).lora_spec
    assert lora is not None and lora.targets == ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")


def test_optimizer_groups_match_adapters() -> None:
    group = "optimizer.groups=[{pattern: '*lora_B', learning_rate_scale: 16.0}]"
    assert load(None, [*LORA, group]).optimizer.groups
    with pytest.raises(PentadError, match=r"optimizer.groups\[0\].pattern is '\*lora_B': expected a pattern"):
        load(None, [group])


def test_adapters_cost_less_than_all_parameters() -> None:
    full, lora = (make_plan(load(None, ["mesh.pp=2", *more]), "cpu") for more in ((), LORA))
    for kind in ("gradients", "optimizer"):
        assert memory(lora, 0)[kind] < memory(full, 0)[kind] / 20
    assert memory(lora, 0)["parameters"] > memory(full, 0)["parameters"]
    assert all(x < y / 20 for x, y in zip(costs_of(lora).weight, costs_of(full).weight, strict=True))
    assert all(x > y for x, y in zip(costs_of(lora).forward, costs_of(full).forward, strict=True))
    work, frozen = (flops_per_token(full.model, 128, frozen=each) for each in (False, True))
    assert 2 / 3 * work < frozen < work


def test_zero_3_shards_frozen_weights_and_counts_their_gathers() -> None:
    mesh = ("mesh.pp=2", "mesh.dp=2", "schedule.name=interleaved", "schedule.chunks=4", "batch.global_batch_size=16")
    full, cut = (make_plan(load(None, [*LORA, *mesh, *zero]), "cpu") for zero in (["zero.stage=2"], ZERO_3))
    frozen = sum(map(full.size, full.frozen_shards_of(0)))
    largest = max(map(full.size, full.frozen_shards_of(0)))
    assert 4 * frozen < memory(full, 0)["parameters"] < 4 * 1.02 * frozen
    assert 4 * (frozen / 2 + largest) < memory(cut, 0)["parameters"] < 4 * 1.02 * (frozen / 2 + largest)
    costs = costs_of(cut)
    assert max(costs.gather) > 5 * max(costs.reduce)
    assert max(costs.gather) > 5 * max(costs_of(full).gather)  # gathers adapters only
    gathered = [collective_bytes(plan, 0)["ALL_GATHER"] for plan in (full, cut)]
    assert gathered[1] - gathered[0] > 4 * frozen / 2


def test_frozen_weights_are_those_that_the_run_began_with(tmp_path: Path) -> None:
    plan = make_plan(load(None, [*LORA]), "cpu")
    folder = checkpoint.folder_of(tmp_path, 1)
    folder.mkdir()
    content = safetensors.numpy.save({"steps": np.array(1)})
    written = write_file(folder / "stage-000.safetensors", [memoryview(content)])
    shards = [
        Shard(
            "stage-000.safetensors",
            written.bytes,
            written.sha256,
            {"steps": {"dtype": "I64", "shape": []}},
            written.crc32,
        )
    ]
    checkpoint.commit(folder, step=1, shards=shards, meta={})
    base = LoraBase(str(folder), checkpoint.fingerprint(folder))
    found = with_base(plan, base)
    assert found.lora is not None and found.lora.base == base
    (folder / "manifest.json").unlink()
    with pytest.raises(PentadError, match=f"the frozen weights of lora cannot be read: checkpoint {folder}"):
        with_base(plan, base)
    checkpoint.commit(folder, step=1, shards=shards, meta={"run": "another"})
    with pytest.raises(PentadError, match=f"the checkpoint in {folder} has changed since the run began"):
        with_base(plan, base)
