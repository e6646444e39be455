"""LoRA against PEFT: importing its adapters, the losses of training, and loading and merging an export with it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import hf_models
import peft
import pytest
import torch
import torch.nn.functional as F
from fleet import losses_of
from hf_files import take
from peft_files import ATTENTION, write_adapter
from plans import MODEL, global_batch, plan_of
from safetensors.torch import load_file, save_file

from pentad.schedules.ir.errors import PentadError
from pentad.schedules.spec.learning_rate import LearningRate
from pentad.schedules.spec.lora import EXPERTS, LATENT_ATTENTION, LoraBase, LoraSpec, targets_of
from pentad.schedules.spec.model import ModelSpec
from pentad.schedules.spec.plan import Plan
from pentad.workers.checkpoint import checkpoint
from pentad.workers.checkpoint.manifest import Shard
from pentad.workers.data.sources import open_dataset
from pentad.workers.hf.exporter import ExportRequest, export_checkpoint
from pentad.workers.hf.importer import Imported
from pentad.workers.hf.kept_files import FOLDER, read_files
from pentad.workers.hf.peft import WEIGHTS, export_adapter, import_adapter, read_adapter

STEPS = 20
MESHES = {
    "llama": {"tp": 2},
    "phi3": {"tp": 2},
    "qwen3-moe": {"ep": 2, "tp": 2},
    "mixtral": {"tp": 2},
    "gpt-oss": {"ep": 2, "tp": 2},
    "deepseek-v3": {"ep": 2, "tp": 2},
    "deepseek-v3-yarn": {"tp": 2},
    "deepseek-v3-halves": {"ep": 2},
}


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("family", MESHES)
def test_training_equals_that_of_peft(fleet, corpus, tmp_path, family):
    torch.manual_seed(0)
    model = hf_models.make(family, vocab_size=300)
    files = hf_models.save(model, tmp_path / "files")
    imported = take(files, tmp_path / "base")
    lora = LoraSpec(3, 6.0, targets_of(imported.model, fused=family == "phi3"), base_of(imported.folder))
    plan = plan_on(corpus, without_balancing(imported.model), lora, MESHES[family])
    theirs, request = saved_by_peft(model, lora, tmp_path / "first"), request_of(imported)
    first = import_adapter(tmp_path / "first", tmp_path / "checkpoints", request, lora)
    last = checkpoint.folder_of(tmp_path / "checkpoints", STEPS)
    outcomes = fleet.run(plan, [(0, STEPS)], restore=str(first), save=str(last))
    entries = [Shard.from_plain(entry) for outcome in outcomes for entry in outcome.shards]
    checkpoint.commit(last, step=STEPS, shards=entries, meta={"lora": lora.plain})

    for step, loss in enumerate(train_with_peft(theirs, plan)):
        sums = losses_of(outcomes, step).values()
        assert sum(sums) / plan.batch.tokens == pytest.approx(loss, rel=1e-4)

    source = checkpoint.open_checkpoint(last)
    export_adapter(source, tmp_path / "adapter", request, lambda done, total: None)
    export_checkpoint(source, tmp_path / "merged", request, lambda done, total: None)
    tokens = batch_of(plan, 0)[0]
    loaded = peft.PeftModel.from_pretrained(type(model).from_pretrained(files), tmp_path / "adapter")
    merged = type(model).from_pretrained(tmp_path / "merged")
    with torch.no_grad():
        expected = theirs(tokens).logits
        assert (loaded(tokens).logits - expected).norm() <= 1e-3 * expected.norm()
        with theirs.disable_adapter():
            assert (theirs(tokens).logits - expected).norm() >= 1e-2 * expected.norm()
        assert (merged(tokens).logits - loaded(tokens).logits).norm() <= 1e-5 * expected.norm()


LOGITS: list[Any] = [
    ("llama", ("q_proj", "v_proj", "up_proj", "down_proj"), torch.float32),
    ("deepseek-v3", (*LATENT_ATTENTION, *EXPERTS), torch.float32),
    pytest.param("llama", ("q_proj", "down_proj"), torch.bfloat16, marks=pytest.mark.slow),
    pytest.param("deepseek-v3-halves", (*LATENT_ATTENTION, *EXPERTS), torch.float32, marks=pytest.mark.slow),
    pytest.param("deepseek-v3-yarn", ("q_proj", "experts.down_proj"), torch.float32, marks=pytest.mark.slow),
    pytest.param("gpt-oss", EXPERTS, torch.float32, marks=pytest.mark.slow),
    pytest.param("gpt-oss", EXPERTS[:1], torch.float32, marks=pytest.mark.slow),
    pytest.param("mixtral", EXPERTS[1:], torch.float32, marks=pytest.mark.slow),
    pytest.param("qwen3-moe", EXPERTS, torch.bfloat16, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("family", "targets", "dtype"), LOGITS)
def test_an_imported_adapter_has_the_logits_of_peft(tmp_path, family, targets, dtype):
    torch.manual_seed(0)
    model = hf_models.make(family)
    imported = take(hf_models.save(model, tmp_path / "files"), tmp_path / "base")
    lora = LoraSpec(3, 6.0, targets, base_of(imported.folder))
    theirs, request = saved_by_peft(model, lora, tmp_path / "adapter", dtype), request_of(imported)
    folder = import_adapter(tmp_path / "adapter", tmp_path / "checkpoints", request, lora)
    source = checkpoint.open_checkpoint(folder)
    export_checkpoint(source, tmp_path / "merged", request, lambda done, total: None)
    export_adapter(source, tmp_path / "again", request, lambda done, total: None)
    tokens = torch.arange(32).view(2, 16)
    with torch.no_grad():
        expected, merged = theirs(tokens).logits, type(model).from_pretrained(tmp_path / "merged")
        assert (merged(tokens).logits - expected).norm() <= 1e-5 * expected.norm()
        with theirs.disable_adapter():
            assert (theirs(tokens).logits - expected).norm() >= 1e-2 * expected.norm()
    before, after = (load_file(tmp_path / name / WEIGHTS) for name in ("adapter", "again"))
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], value.float()) for name, value in before.items())


ADAPTED = replace(MODEL, layers=2)
BAD_FOLDERS: list[tuple[dict[str, Any], LoraSpec, str]] = [
    ({}, LoraSpec(4, 4.0, ATTENTION), "lora.rank is 4: expected 2, the r of {at}/adapter_config.json"),
    ({}, LoraSpec(2, 16.0, ATTENTION), "lora.alpha is 16: expected 4, the lora_alpha of {at}/adapter_config.json"),
    (
        {},
        LoraSpec(2, 4.0, ("v_proj", "q_proj")),
        "lora.targets is q_proj, v_proj: expected k_proj, o_proj, q_proj, v_proj, as in {at}/adapter_model.safetensors",
    ),
    (
        {"use_dora": True},
        LoraSpec(2, 4.0, ATTENTION),
        "{at}/adapter_config.json has use_dora = true: expected plain LoRA without it",
    ),
    (
        {"init_lora_weights": "pissa"},
        LoraSpec(2, 4.0, ATTENTION),
        '{at}/adapter_config.json has init_lora_weights = "pissa": expected plain LoRA without it',
    ),
    (
        {"target_parameters": 7},
        LoraSpec(2, 4.0, ATTENTION),
        "{at}/adapter_config.json has target_parameters = 7: expected a list of names",
    ),
    (
        {"peft_type": "IA3"},
        LoraSpec(2, 4.0, ATTENTION),
        "{at}/adapter_config.json has no peft_type LORA: expected the configuration of a LoRA adapter",
    ),
]


@pytest.mark.parametrize(("changes", "lora", "sentence"), BAD_FOLDERS)
def test_an_adapter_of_another_kind_is_refused(tmp_path, changes, lora, sentence):
    write_adapter(tmp_path, ADAPTED, **changes)
    good = write_adapter(tmp_path / "good", ADAPTED)
    assert read_adapter(good, ExportRequest("llama", ADAPTED, 0), LoraSpec(2, 4.0, ATTENTION))
    refused_adapter(tmp_path, ADAPTED, lora, sentence)


MODULE = "base_model.model.model.layers.1.self_attn"
OF_BASE = "from the sizes of the model of run.init_from"
BAD_BASES: list[tuple[dict[str, Any], str]] = [
    (
        {"layers": 1},
        f"tensor {MODULE}.k_proj.lora_A.weight is in {{file}}: expected only those of 1 layers, which the model of "
        "run.init_from has",
    ),
    (
        {"layers": 3},
        f"tensor {MODULE.replace('1', '2')}.q_proj.lora_A.weight in {{file}} is missing: expected [2, 16], {OF_BASE}",
    ),
    (
        {"hidden": 32},
        f"tensor {MODULE.replace('1', '0')}.q_proj.lora_A.weight in {{file}} has shape [2, 16]: expected [2, 32], "
        f"{OF_BASE}",
    ),
]


@pytest.mark.parametrize(("sizes", "sentence"), BAD_BASES)
def test_an_adapter_of_another_model_is_refused(tmp_path, sizes, sentence):
    write_adapter(tmp_path, ADAPTED)
    refused_adapter(tmp_path, replace(ADAPTED, **sizes), LoraSpec(2, 4.0, ATTENTION), sentence)


def test_a_folder_without_an_adapter_is_refused(tmp_path):
    lora = LoraSpec(2, 4.0, ATTENTION)
    expected = "expected a folder with adapter_config.json and adapter_model.safetensors, as PEFT saves them"
    refused_adapter(
        tmp_path, ADAPTED, lora, f"lora.init_from is '{{at}}', whose adapter_config.json cannot be read: {expected}"
    )
    file = write_adapter(tmp_path, ADAPTED) / WEIGHTS
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(PentadError, match=r"adapter_model\.safetensors cannot be read \(.*\): expected the adapters"):
        read_adapter(tmp_path, ExportRequest("llama", ADAPTED, 0), lora)
    save_file({"base_model.model.lm_head.lora_A.weight": torch.zeros(2, 16)}, file)
    refused_adapter(
        tmp_path,
        ADAPTED,
        lora,
        "tensor base_model.model.lm_head.lora_A.weight is in {file}: expected only adapters of q_proj, k_proj, v_proj, "
        "q_a_proj, q_b_proj, kv_a_proj_with_mqa, kv_b_proj, o_proj, gate_proj, up_proj, down_proj, qkv_proj, "
        "gate_up_proj, experts.gate_up_proj, experts.down_proj",
    )


def refused_adapter(folder: Path, model: ModelSpec, lora: LoraSpec, sentence: str) -> None:
    with pytest.raises(PentadError) as caught:
        read_adapter(folder, ExportRequest("llama", model, 0), lora)
    assert str(caught.value) == sentence.format(at=folder, file=folder / WEIGHTS)


def saved_by_peft(
    model: torch.nn.Module, lora: LoraSpec, folder: Path, dtype: torch.dtype = torch.float32
) -> peft.PeftModel:
    """The model with random adapters, B included, saved to `folder` by PEFT."""
    config = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=int(lora.alpha),
        target_modules=[target for target in lora.targets if target not in EXPERTS],
        target_parameters=[target for target in lora.targets if target in EXPERTS] or None,
        lora_dropout=0.0,
        init_lora_weights=False,
    )
    found = peft.get_peft_model(model, config)
    with torch.no_grad():
        for name, value in found.named_parameters():
            if "lora_" in name:
                value.copy_((value * 0.3).to(dtype))
    found.save_pretrained(str(folder))
    if dtype != torch.float32:
        save_file({name: each.to(dtype) for name, each in load_file(folder / WEIGHTS).items()}, folder / WEIGHTS)
    return found


def plan_on(corpus: str, model: ModelSpec, lora: LoraSpec, sizes: dict[str, Any]) -> Plan:
    plan = plan_of("gpipe", 1, 1, 2, corpus, "float32", model=model, lora=lora, **sizes)
    return replace(plan, optimizer=replace(plan.optimizer, learning_rate=LearningRate(1e-2, 1e-3, 2, STEPS)))


def base_of(folder: Path) -> LoraBase:
    return LoraBase(str(folder), checkpoint.fingerprint(folder))


def request_of(imported: Imported) -> ExportRequest:
    kept = read_files(imported.folder.parent.parent / FOLDER)
    return ExportRequest(imported.family, imported.model, positions=64, kept=kept)


def without_balancing(model: ModelSpec) -> ModelSpec:
    """`model` as transformers trains it unless asked for the routers' logits."""
    if model.experts is None:
        return model
    return replace(model, experts=replace(model.experts, aux_loss_coef=0.0, bias_update_rate=0.0))


def batch_of(plan: Plan, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    inputs, following, *_ = global_batch(open_dataset(plan.data, plan.batch, plan.model.vocab, plan.seed), step)
    return inputs, following


def train_with_peft(model: torch.nn.Module, plan: Plan) -> list[float]:
    spec, losses = plan.optimizer, []
    parameters = [each for each in model.parameters() if each.requires_grad]
    adam = torch.optim.AdamW(
        parameters, lr=1.0, betas=(spec.beta1, spec.beta2), eps=spec.eps, weight_decay=spec.weight_decay
    )
    for step in range(STEPS):
        adam.param_groups[0]["lr"] = spec.learning_rate.at(step)
        inputs, targets = batch_of(plan, step)
        loss = F.cross_entropy(model(inputs).logits.flatten(0, 1), targets.flatten())
        adam.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, spec.clip_norm or float("inf"))
        adam.step()
        losses.append(loss.item())
    return losses
