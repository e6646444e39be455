"""Every family against transformers in float32: logits in one process, loss and gradients on meshes as well."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import hf_models
import pytest
import torch
import torch.nn.functional as F
from fleet import assembled, losses_of
from hf_files import stage_of, take, tensors_of
from plans import close, plan_of

from pentad.schedules.spec.model import ModelShape
from pentad.schedules.spec.plan import Plan
from pentad.workers.data.corpus import open_corpus
from pentad.workers.data.samples import microbatch
from pentad.workers.parallel.async_ops import run_to_completion

ROWS, TOLERANCE = 4, 1e-4
NAMES = [name for name in hf_models.MODELS if not name.endswith("predicted")]
MESHES = [{"tp": 2}, *(pytest.param(sizes, marks=pytest.mark.slow) for sizes in ({}, {"pp": 2}, {"ep": 2}))]


class Theirs(NamedTuple):
    """What transformers gives for a step's tokens, and its weights as a checkpoint of pentad."""

    shape: ModelShape
    folder: Path
    logits: torch.Tensor  # [B, S, V]
    loss: float
    gradients: dict[str, torch.Tensor]  # by pentad's names


@pytest.fixture(scope="module")
def theirs(corpus: str, tmp_path_factory: pytest.TempPathFactory):
    made: dict[str, Theirs] = {}

    def get(name: str) -> Theirs:
        if name not in made:
            made[name] = run(name, corpus, tmp_path_factory.mktemp(name))
        return made[name]

    return get


def run(name: str, corpus: str, folder: Path) -> Theirs:
    torch.manual_seed(0)
    model = hf_models.make(name, vocab_size=300)
    done = take(hf_models.save(model, folder / "files"), folder / "out")
    inputs, targets = tokens(corpus)
    logits = model(input_ids=inputs).logits
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    loss.backward()
    with torch.no_grad():  # gradients are laid out as weights are, so that they become pentad's in the same way
        for parameter in model.parameters():
            parameter.copy_(torch.zeros(()) if parameter.grad is None else parameter.grad)
    grads = take(hf_models.save(model, folder / "gradient files"), folder / "gradients")
    found = {key.removeprefix("model."): tensor for key, tensor in tensors_of(grads).items() if "bias" not in key}
    experts = done.shape.experts and replace(done.shape.experts, aux_loss_coef=0.0)
    return Theirs(replace(done.shape, experts=experts), done.folder, logits.detach(), loss.item(), found)


def tokens(corpus: str) -> tuple[torch.Tensor, torch.Tensor]:
    pair = microbatch(open_corpus(corpus, False), 7, 0, ROWS, range(ROWS), 8)
    return torch.from_numpy(pair[0]), torch.from_numpy(pair[1])


def planned(data: str, shape: ModelShape, sizes: dict[str, Any]) -> Plan:
    rest = {axis: size for axis, size in sizes.items() if axis != "pp"}
    microbatches = ROWS // 2 // sizes.get("ep", 1)
    name = "zb-h2" if sizes.get("pp", 1) > 1 else "gpipe"
    return plan_of(name, 1, sizes.get("pp", 1), microbatches, data, "float32", model=shape, **rest)


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_transformers(corpus, theirs, name):
    there = theirs(name)
    plan = planned(corpus, there.shape, {})
    stage = stage_of(plan, there.folder)
    inputs, targets = tokens(corpus)
    for number in range(plan.batch.microbatches):
        rows = slice(2 * number, 2 * number + 2)
        further = torch.empty(0, inputs[rows].numel(), dtype=torch.int64)
        run_to_completion(stage.forward(number, None, inputs[rows].flatten(), targets[rows].flatten(), further))
        ending = stage.kept[number].ending
        assert ending is not None
        assert close(ending.scores.logits.view(2, 8, -1), there.logits[rows], TOLERANCE)


@pytest.mark.parametrize("sizes", MESHES, ids=lambda sizes: "-".join(f"{k}{v}" for k, v in sizes.items()) or "one")
@pytest.mark.parametrize("name", NAMES)
def test_loss_and_gradients_are_those_of_transformers(fleet, corpus, theirs, name, sizes):
    there = theirs(name)
    if "ep" in sizes and (there.shape.experts is None or there.shape.experts.count % 2):
        pytest.skip("no experts to share out evenly")
    outcomes = fleet.run(planned(corpus, there.shape, sizes), [(0, 1)], restore=str(there.folder))
    sums = losses_of(outcomes).values()
    assert sum(sums) / (ROWS * 8) == pytest.approx(there.loss, rel=TOLERANCE)
    like = there.gradients | {"head": there.gradients["embedding"]} if there.shape.tied else there.gradients
    found = assembled([outcome.gradients[0] for outcome in outcomes], like)
    for key, gradient in there.gradients.items():
        assert close(found[key], gradient, TOLERANCE), key
