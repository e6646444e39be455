"""LoRA against PEFT: the losses of training, and what `peft` loads and merges of an exported adapter."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import hf_models
import pytest
import torch
import torch.nn.functional as F
from fleet import losses_of
from hf_files import take
from plans import global_batch, plan_of

from pentad.schedules.spec.learning_rate import LearningRate
from pentad.schedules.spec.lora import LoraBase, LoraSpec, targets_of
from pentad.schedules.spec.model import ModelSpec
from pentad.schedules.spec.plan import Plan
from pentad.workers.checkpoint import checkpoint
from pentad.workers.checkpoint.manifest import Shard
from pentad.workers.data.sources import open_dataset
from pentad.workers.hf.exporter import Request, export_checkpoint
from pentad.workers.hf.peft import export_adapter

STEPS, MESHES = 20, {"llama": {"tp": 2}, "qwen3-moe": {"ep": 2, "tp": 2}}


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("family", MESHES)
def test_training_equals_that_of_peft(fleet, corpus, tmp_path, family):
    import peft

    torch.manual_seed(0)
    model = hf_models.make(family, vocab_size=300)
    files = hf_models.save(model, tmp_path / "files")
    imported = take(files, tmp_path / "base")
    lora = LoraSpec(3, 6.0, targets_of(imported.model), base_of(imported.folder))
    plan = plan_on(corpus, imported.model, lora, MESHES[family])
    outcomes = fleet.run(plan, [(0, STEPS)], save=str(tmp_path / f"step-{STEPS:08d}"))
    entries = [Shard.from_plain(entry) for outcome in outcomes for entry in outcome.shards]
    checkpoint.commit(tmp_path / f"step-{STEPS:08d}", step=STEPS, shards=entries, meta={"lora": lora.plain})

    first = export_initial(fleet, plan, family, tmp_path)
    theirs = peft.PeftModel.from_pretrained(model, first, is_trainable=True)
    losses = train_with_peft(theirs, plan)
    for step, loss in enumerate(losses):
        sums = losses_of(outcomes, step).values()
        assert sum(sums) / plan.batch.tokens == pytest.approx(loss, rel=1e-4)

    source, request = checkpoint.open_checkpoint(tmp_path / f"step-{STEPS:08d}"), request_of(family, plan)
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


def plan_on(corpus: str, model: ModelSpec, lora: LoraSpec, sizes: dict[str, Any]) -> Plan:
    plan = plan_of("gpipe", 1, 1, 2, corpus, "float32", model=model, **sizes)
    return replace(plan, lora=lora, optimizer=replace(plan.optimizer, learning_rate=LearningRate(1e-2, 1e-3, 2, STEPS)))


def base_of(folder: Path) -> LoraBase:
    return LoraBase(str(folder), checkpoint.fingerprint(folder))


def request_of(family: str, plan: Plan) -> Request:
    return Request(family, plan.model, positions=64)


def export_initial(fleet, plan: Plan, family: str, folder: Path) -> Path:
    """The adapter before the first step, for PEFT."""
    assert plan.lora is not None
    still = replace(plan, optimizer=replace(plan.optimizer, learning_rate=LearningRate(0.0, 0.0, 0, 1)))
    outcomes = fleet.run(still, [(0, 1)], save=str(folder / "step-00000001"))
    entries = [Shard.from_plain(entry) for outcome in outcomes for entry in outcome.shards]
    checkpoint.commit(folder / "step-00000001", step=1, shards=entries, meta={"lora": plan.lora.plain})
    source = checkpoint.open_checkpoint(folder / "step-00000001")
    export_adapter(source, folder / "initial", request_of(family, plan), lambda done, total: None)
    return folder / "initial"


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
