"""What a stage keeps between F, B and W."""

from __future__ import annotations

import weakref

import pytest
import torch
from plans import MODEL, plan_of

from pentad.schedules.spec.plan import ParamShard
from pentad.workers.model import layer
from pentad.workers.model.stage import Stage
from pentad.workers.parallel.async_ops import run_to_completion
from pentad.workers.params.param_buffers import buffers_of
from pentad.workers.params.parameters import create


def test_a_layer_frees_what_only_b_needs_before_the_next_layer_runs(
    corpus: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_of("gpipe", 1, 1, 1, corpus)
    stage = Stage(plan, 0, buffers_of(plan, 0, 0, {ParamShard(0): create(plan, ParamShard(0), torch.device("cpu"))}))
    tokens = torch.arange(plan.batch.rows * plan.batch.length)
    run_to_completion(stage.forward(0, None, tokens, tokens))
    kept = [weakref.ref(leaves.mlp) for leaves in stage.kept[0].leaves]
    alive, backward = [], layer.backward

    def watched(*arguments):
        alive.append(sum(ref() is not None for ref in kept))
        return backward(*arguments)

    monkeypatch.setattr(layer, "backward", watched)
    run_to_completion(stage.backward_input(0, None))
    assert alive == list(range(MODEL.layers, 0, -1))
    stage.backward_weight(0)
    assert not stage.kept
    assert not stage.deferred
