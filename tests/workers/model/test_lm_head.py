"""Logits in chunks of rows: nothing of the size of the vocabulary outlives a chunk."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from weakref import WeakValueDictionary

import pytest
import torch
from fake_groups import FAMILIES, fake_collectives, make_stage
from plans import MODEL, plan_of
from torch.utils._python_dispatch import TorchDispatchMode

from pentad.schedules.spec.plan import Plan
from pentad.workers.model.base_stage import StageInputs
from pentad.workers.model.stage import Stage
from pentad.workers.parallel.async_ops import run_to_completion

ROWS = 6  # of a chunk, of 16 tokens
VOCAB = 320  # no other width of these models
MODELS = {
    "llama": replace(MODEL, layers=2, vocab=VOCAB),
    "mtp": replace(FAMILIES["deepseek with mtp"], layers=2, vocab=VOCAB),
}


class Watch(TorchDispatchMode):
    """The most rows [rows, V] of a tensor, and which of those are alive; without views of the `weights`, which are
    given as addresses."""

    def __init__(self, width: int, weights: set[int]) -> None:
        super().__init__()
        self.width, self.weights, self.most = width, weights, 0
        self.alive = WeakValueDictionary[int, torch.UntypedStorage]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for each in result if isinstance(result, tuple | list) else (result,):
            if not isinstance(each, torch.Tensor) or each.dim() != 2 or each.shape[1] != self.width:
                continue
            storage = each.untyped_storage()
            if storage.data_ptr() not in self.weights:
                self.alive[storage.data_ptr()] = storage
                self.most = max(self.most, len(each))
        return result


def rows_made(plan: Plan, stage: Stage) -> list[int]:
    """The most rows [rows, V / tp] at once in F, RECOMPUTE, B and W."""
    tokens, found, width = torch.arange(plan.slice_tokens) % VOCAB, list[int](), plan.model.vocab // plan.mesh.tp
    weights = {buffers.parameters.compute.untyped_storage().data_ptr() for buffers in stage.param_buffers}
    mtp = tokens.expand(plan.model.mtp_layers, -1) if plan.model.mtp_layers else None
    inputs = StageInputs(tokens=tokens, targets=tokens, mtp_targets=mtp)
    recompute = [lambda: stage.recompute(0)] * (plan.recompute_mode(0) != "none")
    for run in (
        lambda: run_to_completion(stage.forward(0, inputs)),
        *recompute,
        lambda: run_to_completion(stage.backward_input(0, None)),
        lambda: stage.backward_weight(0),
    ):
        with Watch(width, weights) as watch:
            run()
        found.append(watch.most)
        if plan.logit_rows:
            assert not watch.alive, "logits outlive what made them"
    return found


@pytest.mark.sampled(3)
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("name", MODELS)
def test_no_logits_outlive_a_chunk(monkeypatch, corpus, name, tp):
    fake_collectives(monkeypatch)

    def rows_of(**more: Any) -> list[int]:
        plan = plan_of("gpipe", 1, 1, 1, corpus, model=MODELS[name], tp=tp, **more)
        return rows_made(plan, make_stage(plan, 0))

    assert rows_of(logit_rows=ROWS) == [ROWS, 0, ROWS]
    assert rows_of(logit_rows=ROWS, recompute="full") == [ROWS, ROWS, 0, ROWS]
    assert rows_of(logit_rows=1000) == [16, 0, 16]
    assert rows_of()[0] == 16
