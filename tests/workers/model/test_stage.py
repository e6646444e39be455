"""Lifetimes of what a stage holds between F, B and W."""

from __future__ import annotations

import weakref

import pytest
import torch
from fake_groups import make_stage
from plans import MODEL, plan_of
from small_models import FAMILIES

from pentad.workers.model.attention import Attention
from pentad.workers.model.base_stage import StageInputs
from pentad.workers.model.layer import Layer
from pentad.workers.model.mlp import MLP
from pentad.workers.parallel.async_ops import run_to_completion


def test_activations_are_freed_before_the_backward_of_the_next_layer(
    corpus: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_of("gpipe", 1, 1, 1, corpus)
    stage = make_stage(plan, 0)
    tokens = torch.arange(plan.batch.micro_batch_size * plan.batch.sequence_length)
    run_to_completion(stage.forward(0, StageInputs(tokens=tokens, targets=tokens)))
    activations = [weakref.ref(each) for each in stage.saved[0].recomputable]
    alive, backward = [], Layer.backward

    def counting_backward(*arguments):
        alive.append(sum(ref() is not None for ref in activations))
        return backward(*arguments)

    monkeypatch.setattr(Layer, "backward", counting_backward)
    run_to_completion(stage.backward_input(0, None))
    assert alive == list(range(MODEL.layers, 0, -1))
    stage.backward_weight(0)
    assert not stage.saved
    assert not stage.deferred


@pytest.mark.parametrize("name", ["llama 3.1", "olmo2", "gemma2"])
def test_what_w_alone_reads_is_made_after_b_with_the_same_bits(
    corpus: str, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    plan = plan_of("gpipe", 1, 1, 1, corpus, model=FAMILIES[name])
    monkeypatch.setattr(torch, "empty_like", lambda x: torch.full_like(x, torch.nan))

    def gradients() -> dict[str, torch.Tensor]:
        stage = make_stage(plan, 0)
        tokens = torch.arange(plan.batch.micro_batch_size * plan.batch.sequence_length)
        run_to_completion(stage.forward(0, StageInputs(tokens=tokens, targets=tokens)))
        run_to_completion(stage.backward_input(0, None))
        stage.backward_weight(0)
        return {name: each.gradient for name, each in stage.bound.by_name.items() if each.gradient is not None}

    found = gradients()
    for sublayer in (Attention, MLP):
        monkeypatch.setattr(sublayer, "only_w_reads", lambda *_: False)
    for name, expected in gradients().items():
        assert torch.equal(found[name], expected), name
