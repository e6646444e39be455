"""Logits in chunks of rows: nothing as wide as the vocabulary outlives a chunk, and tensor ranks get what kept logits
give, while they exchange the rows of chunks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from weakref import WeakValueDictionary

import pytest
import torch
from fake_groups import FAMILIES, fake_collectives, make_stage
from plans import MODEL, plan_of
from thread_ranks import on_ranks
from torch.utils._python_dispatch import TorchDispatchMode

from pentad.schedules.spec.plan import Plan
from pentad.workers.linear.linear import Axes, Linear
from pentad.workers.linear.logit_chunks import TokenLoss
from pentad.workers.linear.weight_grad import Param, accumulate_wgrads
from pentad.workers.model.base_stage import StageInputs
from pentad.workers.model.lm_head import head_loss, head_loss_backward
from pentad.workers.model.stage import Stage
from pentad.workers.parallel import tensor_parallel
from pentad.workers.parallel.async_ops import run_to_completion
from pentad.workers.parallel.context_parallel import ContextParallelGroup
from pentad.workers.parallel.tensor_parallel import TensorParallelGroup
from pentad.workers.params.param_buffers import Unwritten

LOSS = TokenLoss(0.5, z_loss=0.1)
ROWS = 6  # in a chunk, of 16 tokens
VOCAB = 320  # unlike any other width in these models
MODELS = {
    "llama": replace(MODEL, layers=2, vocab=VOCAB),
    "mtp": replace(FAMILIES["deepseek with mtp"], layers=2, vocab=VOCAB),
}


class Watch(TorchDispatchMode):
    """Records the most rows of a [rows, V] tensor, and which are alive; not those at the addresses `weights`."""

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
    """The most rows of a tensor [rows, V / tp] in F, RECOMPUTE, B and W."""
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


@pytest.mark.parametrize("split", [1, 1000], ids=["overlapping", "waiting"])
@pytest.mark.parametrize(("count", "rows"), [(2, 4), (2, 5), (2, 100), (4, 8), (4, 3)])
def test_chunks_over_ranks_give_what_kept_logits_do(monkeypatch, count, rows, split):
    monkeypatch.setattr(tensor_parallel, "SPLIT_ROWS", split)
    tokens, hidden, vocab = 6 * count, 5, 8 * count
    random = torch.Generator().manual_seed(count)
    normed, weight = (torch.randn(size, hidden, dtype=torch.float64, generator=random) for size in (tokens, vocab))
    targets = torch.randint(vocab, (tokens,), generator=random)
    targets[3] = -100

    def work(tp: TensorParallelGroup) -> list[list[torch.Tensor]]:
        axes, mine = Axes(tp, ContextParallelGroup()), weight.chunk(count)[tp.rank]
        head, own, found = Linear(Param(mine, torch.zeros_like(mine))), normed.chunk(count)[tp.rank], []
        for chunk in (0, rows):
            saved, losses = head_loss(head, own, targets, axes, LOSS, chunk)
            lse = saved.lse.clone()
            dnormed, work = head_loss_backward(head, saved, axes, LOSS, chunk)
            gradient = torch.zeros_like(mine)
            accumulate_wgrads([work._replace(gradient=gradient)], Unwritten())
            found.append([losses, lse, dnormed, gradient])
        return found

    for kept, chunks in on_ranks(count, tokens * vocab, work):
        for expected, each in zip(kept, chunks, strict=True):
            torch.testing.assert_close(each, expected, rtol=1e-12, atol=1e-12)
