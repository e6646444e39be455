"""Fine-tuning all parameters on conversations: the losses of transformers with torch.optim.AdamW, on every mesh."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import hf_models
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from chat_templates import CHATML, write_tokenizer
from corpora import build
from fleet import losses_of
from hf_files import take
from plans import GlobalBatch, data_of, global_batch, plan_on_mesh

from pentad.schedules.spec.data import DataSpec
from pentad.schedules.spec.learning_rate import LearningRate
from pentad.schedules.spec.model import ModelSpec
from pentad.schedules.spec.plan import BatchSpec, Plan
from pentad.schedules.spec.schedule_spec import MemoryOptions
from pentad.workers.data.sources import open_dataset

STEPS, SEQUENCES, LENGTH = 20, 8, 32
MESHES: list[Any] = [
    ("llama", "gpipe", {}, 0),
    ("llama", "zb-h2", {"pp": 2, "tp": 2}, 0),
    ("llama", "1f1b", {"cp": 2, "dp": 2}, 3),
    ("qwen2", "dualpipev", {"pp": 2, "dp": 2}, 1),
    ("qwen2", "1f1b", {"tp": 2, "cp": 2}, 0),
    ("qwen3-moe", "1f1b", {"ep": 2, "pp": 2}, 0),
]


class Trained(NamedTuple):
    """The imported checkpoint from which transformers started, and the losses and gradient norms of its steps."""

    folder: Path
    spec: ModelSpec
    losses: list[float]
    norms: list[float]


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> DataSpec:
    """Conversations of up to three turns, packed; only the assistant's turns are targets."""
    folder, random = tmp_path_factory.mktemp("chats"), np.random.default_rng(0)

    def text() -> str:
        return " ".join(
            random.choice(["What", "is", "the", "answer", "42", "of", "course", "é?"], random.integers(1, 4))
        )

    def turns() -> list[dict[str, str]]:
        pairs = [[{"role": "user", "content": text()}, {"role": "assistant", "content": text()}] for _ in range(3)]
        return [turn for pair in pairs[: random.integers(1, 4)] for turn in pair]

    (folder / "chats.jsonl").write_text("".join(json.dumps({"messages": turns()}) + "\n" for _ in range(300)))
    build(folder / "chats.jsonl", tokenizer=write_tokenizer(folder / "model", CHATML), chat=True)
    return data_of(str(folder / "out"), document_mask=True, packing="documents", cache=str(folder))


@pytest.fixture(scope="module")
def trained(chats: DataSpec, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Trained]:
    found: dict[str, Trained] = {}

    def get(family: str) -> Trained:
        if family not in found:
            folder = tmp_path_factory.mktemp(family)
            torch.manual_seed(0)
            model = hf_models.make(family, vocab_size=400, num_hidden_layers=4)
            imported = take(hf_models.save(model, folder / "files"), folder / "imported")
            spec = unbalanced(imported.model)
            losses, norms = train_with_transformers(model, plan_on(chats, spec, "gpipe", {}, 0))
            found[family] = Trained(imported.folder, spec, losses, norms)
        return found[family]

    return get


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("family", "name", "sizes", "zero"), MESHES)
def test_losses_are_those_of_transformers(fleet, chats, trained, family, name, sizes, zero):
    expected = trained(family)
    plan = plan_on(chats, expected.spec, name, sizes, zero)
    outcomes = fleet.run(plan, [(0, STEPS)], restore=str(expected.folder), optimizer=False)
    for step in range(STEPS):
        counted = sum(each.target_tokens for each in outcomes[0].results[step].sources)
        assert 0 < counted < plan.batch.tokens / 2  # the others are masked
        loss = sum(losses_of(outcomes, step).values()) / counted
        assert loss == pytest.approx(expected.losses[step], rel=1e-4)
        assert outcomes[0].results[step].grad_norm == pytest.approx(expected.norms[step], rel=1e-3)
    assert expected.losses[-1] < expected.losses[0] - 0.5


def unbalanced(model: ModelSpec) -> ModelSpec:
    """`model` without the balancing loss, which transformers adds only where it returns the router's logits."""
    return model if model.experts is None else replace(model, experts=replace(model.experts, aux_loss_coef=0.0))


def plan_on(chats: DataSpec, model: ModelSpec, name: str, sizes: dict[str, int], zero: int) -> Plan:
    plan = plan_on_mesh(chats, name, sizes, dtype="float32", model=model, memory_options=MemoryOptions(zero=zero))
    batch = BatchSpec(SEQUENCES, LENGTH, plan.batch.microbatches, plan.batch.replicas)
    return replace(
        plan, batch=batch, optimizer=replace(plan.optimizer, learning_rate=LearningRate(1e-2, 1e-3, 2, STEPS))
    )


def train_with_transformers(model: torch.nn.Module, plan: Plan) -> tuple[list[float], list[float]]:
    """(losses, gradient norms): AdamW decays matrices only; a loss is the mean over a step's targets."""
    spec, losses, norms = plan.optimizer, [], []
    dataset = open_dataset(plan.data, plan.batch, plan.model.vocab, plan.seed)
    decayed = [each for each in model.parameters() if each.dim() > 1]
    others = [each for each in model.parameters() if each.dim() == 1]
    adam = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": spec.weight_decay}, {"params": others, "weight_decay": 0.0}],
        betas=(spec.beta1, spec.beta2),
        eps=spec.eps,
    )
    assert spec.clip_norm is not None
    for step in range(STEPS):
        for group in adam.param_groups:
            group["lr"] = spec.learning_rate.at(step)
        loss = mean_loss(model, global_batch(dataset, step))
        adam.zero_grad()
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), spec.clip_norm).item())
        adam.step()
        losses.append(loss.item())
    assert max(norms) > spec.clip_norm
    return losses, norms


def mean_loss(model: torch.nn.Module, batch: GlobalBatch) -> torch.Tensor:
    """The loss of transformers, with an explicit mask [B, 1, S, S] and positions that restart in every document."""
    positions = torch.arange(LENGTH)
    same = batch.documents[:, :, None] == batch.documents[:, None, :]
    seen = same & (positions[:, None] >= positions)
    first = same.int().argmax(2)  # the position at which each token's document starts
    mask = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)[:, None]
    logits = model(batch.inputs, attention_mask=mask, position_ids=positions - first).logits
    labels = batch.following.masked_fill(~batch.is_target, -100)
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / batch.is_target.sum()
