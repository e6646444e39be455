"""The dense feed-forward sublayer: down(silu(gate x) * up x), its intermediate size split over the tp ranks."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pentad.kernels.swiglu import swiglu, swiglu_backward
from pentad.workers.model.layer_context import LayerContext, SequenceContext, Views
from pentad.workers.model.weight_grad import LinearWgrad, Wgrad
from pentad.workers.parallel.async_ops import Task, gather2


class MLPWeights(NamedTuple):
    """I is this rank's part of the intermediate size."""

    gate_up: Tensor  # [2I, H]
    down: Tensor  # [H, I]


def weights_of(views: Views, prefix: str) -> MLPWeights:
    return MLPWeights(views[f"{prefix}.mlp.gate_up"], views[f"{prefix}.mlp.down"])


def forward(
    w: MLPWeights, context: LayerContext, sequence: SequenceContext, x: Tensor
) -> Task[tuple[Tensor, None, Tensor]]:
    x = yield from context.tp.all_gather(x)
    gate_up = torch.mm(x, w.gate_up.t())
    out = yield from context.tp.matmul_reduce_scatter(swiglu(gate_up), w.down.t())
    return out, None, gate_up


def recompute(w: MLPWeights, context: LayerContext, x: Tensor, saved: None) -> Tensor:
    """gate_up [T, 2I]: the largest activation of a dense layer."""
    return torch.mm(context.tp.all_gather(x).wait(), w.gate_up.t())


def backward(
    w: MLPWeights,
    g: MLPWeights,
    context: LayerContext,
    sequence: SequenceContext,
    x: Tensor,
    saved: None,
    gate_up: Tensor,
    dy: Tensor,
) -> Task[tuple[Tensor, list[Wgrad]]]:
    dy = yield from context.tp.all_gather(dy)
    dgate_up, gated = swiglu_backward(torch.mm(dy, w.down), gate_up)
    x, dx = yield from gather2(context.tp.all_gather(x), context.tp.matmul_reduce_scatter(dgate_up, w.gate_up))
    return dx, [LinearWgrad(g.down, dy, gated), LinearWgrad(g.gate_up, dgate_up, x)]
