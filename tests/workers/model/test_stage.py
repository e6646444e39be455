"""Lifetimes of what a stage holds between F, B and W."""

from __future__ import annotations

import weakref

import pytest
import torch
from plans import MODEL, plan_of

from pentad.schedules.spec.plan import ParamShard
from pentad.workers.model import layer
from pentad.workers.model.stage import Stage
from pentad.workers.parallel.async_ops import run_to_completion
from pentad.workers.params.param_buffers import make_param_buffers
from pentad.workers.params.parameters import create_parameters


def test_activations_are_freed_before_the_backward_of_the_next_layer(
    corpus: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_of("gpipe", 1, 1, 1, corpus)
    parameters = create_parameters(plan, ParamShard(0), torch.device("cpu"))
    stage = Stage(plan, 0, make_param_buffers(plan, 0, 0, {ParamShard(0): parameters}))
    tokens = torch.arange(plan.batch.micro_batch_size * plan.batch.sequence_length)
    run_to_completion(stage.forward(0, None, tokens, tokens))
    activations = [weakref.ref(each.mlp) for each in stage.saved[0].recomputable]
    alive, backward = [], layer.backward

    def counting_backward(*arguments):
        alive.append(sum(ref() is not None for ref in activations))
        return backward(*arguments)

    monkeypatch.setattr(layer, "backward", counting_backward)
    run_to_completion(stage.backward_input(0, None))
    assert alive == list(range(MODEL.layers, 0, -1))
    stage.backward_weight(0)
    assert not stage.saved
    assert not stage.deferred
