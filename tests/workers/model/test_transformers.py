"""Every family against transformers in float32: logits in one process, loss and gradients also on meshes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import hf_models
import pytest
import torch
import torch.nn.functional as F
from fleet import assemble, losses_of
from hf_files import stage_of, take, tensors_of
from plans import MODEL, data_of, global_batch, is_close, plan_of

from pentad.schedules.spec.batch import BatchSpec
from pentad.schedules.spec.model import ModelSpec
from pentad.schedules.spec.plan import Plan
from pentad.workers.data.sources import open_dataset
from pentad.workers.model.base_stage import StageInputs
from pentad.workers.parallel.async_ops import run_to_completion

ROWS, TOLERANCE = 4, 1e-4
NAMES = [case for case in hf_models.CASES if case != "deepseek-v3-mtp"]
MESHES = [{"tp": 2}, *(pytest.param(sizes, marks=pytest.mark.slow) for sizes in ({}, {"pp": 2}, {"ep": 2}))]


class Theirs(NamedTuple):
    """What transformers computes for the tokens of a step, and its weights as a checkpoint of pentad."""

    model: ModelSpec
    checkpoint: Path
    logits: torch.Tensor  # [B, S, V]
    loss: float
    gradients: dict[str, torch.Tensor]  # by pentad's names


@pytest.fixture(scope="module")
def theirs(corpus: str, tmp_path_factory: pytest.TempPathFactory):
    results: dict[str, Theirs] = {}

    def get(name: str) -> Theirs:
        if name not in results:
            results[name] = run_transformers(name, corpus, tmp_path_factory.mktemp(name))
        return results[name]

    return get


def run_transformers(name: str, corpus: str, folder: Path) -> Theirs:
    torch.manual_seed(0)
    model = hf_models.make(name, vocab_size=300)
    imported = take(hf_models.save(model, folder / "files"), folder / "out")
    inputs, targets = tokens(corpus)
    logits = model(input_ids=inputs).logits
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    loss.backward()
    with torch.no_grad():  # saved and imported as if they were weights, gradients get pentad's names and layout
        for parameter in model.parameters():
            parameter.copy_(torch.zeros(()) if parameter.grad is None else parameter.grad)
    tensors = tensors_of(take(hf_models.save(model, folder / "gradient files"), folder / "gradients"))
    gradients = {
        key.removeprefix("model."): tensor for key, tensor in tensors.items() if not key.endswith("experts.bias")
    }
    # Biases affect the routing even if they are not updated.
    experts = imported.model.experts and replace(imported.model.experts, aux_loss_coef=0.0, bias_update_rate=0.0)
    return Theirs(replace(imported.model, experts=experts), imported.folder, logits.detach(), loss.item(), gradients)


def tokens(corpus: str) -> tuple[torch.Tensor, torch.Tensor]:
    inputs, following, *_ = global_batch(open_dataset(data_of(corpus), BatchSpec(ROWS, 8, 1, 1), MODEL.vocab, 7), 0)
    return inputs, following


def plan_on(data: str, model: ModelSpec, sizes: dict[str, Any]) -> Plan:
    axes = {axis: size for axis, size in sizes.items() if axis != "pp"}
    microbatches = ROWS // 2 // sizes.get("ep", 1)
    name = "zb-h2" if sizes.get("pp", 1) > 1 else "gpipe"
    return plan_of(name, 1, sizes.get("pp", 1), microbatches, data, "float32", model=model, **axes)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_transformers(corpus, theirs, name):
    expected = theirs(name)
    plan = plan_on(corpus, expected.model, {})
    stage = stage_of(plan, expected.checkpoint)
    inputs, targets = tokens(corpus)
    for mb in range(plan.batch.microbatches):
        rows = slice(2 * mb, 2 * mb + 2)
        run_to_completion(stage.forward(mb, StageInputs(None, inputs[rows].flatten(), targets[rows].flatten())))
        head = stage.saved[mb].head
        assert head is not None
        logits, cap = head.loss.logits.view(2, 8, -1), expected.model.final_logit_softcapping
        logits = cap * torch.tanh(logits / cap) if cap else logits
        assert is_close(logits, expected.logits[rows], TOLERANCE)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("sizes", MESHES, ids=lambda sizes: "-".join(f"{k}{v}" for k, v in sizes.items()) or "one")
@pytest.mark.parametrize("name", NAMES)
def test_loss_and_gradients_are_those_of_transformers(fleet, corpus, theirs, name, sizes):
    expected = theirs(name)
    experts = expected.model.experts
    if "ep" in sizes and (experts is None or experts.num_experts % 2):
        pytest.skip("no experts that two ranks could share evenly")
    outcomes = fleet.run(plan_on(corpus, expected.model, sizes), [(0, 1)], restore=str(expected.checkpoint))
    losses = losses_of(outcomes).values()
    assert sum(losses) / (ROWS * 8) == pytest.approx(expected.loss, rel=TOLERANCE)
    like = dict(expected.gradients)
    if expected.model.tie_word_embeddings:
        like["head"] = like["embedding"]
    gradients = assemble([outcome.gradients[0] for outcome in outcomes], like)
    for name, gradient in expected.gradients.items():
        assert is_close(gradients[name], gradient, TOLERANCE), name
