"""The dense feed-forward sublayer: down(act(gate x) * up x), its intermediate size split over the tp ranks."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pentad.kernels.glu import Activation, glu, glu_backward
from pentad.schedules.spec.model import ModelSpec
from pentad.workers.model.layer_context import LayerContext, SequenceContext
from pentad.workers.model.weight_grad import LinearWgrad, Param, Params, Wgrad
from pentad.workers.parallel.async_ops import Task, gather2


class MLPRecomputable(NamedTuple):
    x: Tensor  # [T / tp, H]
    gate_up: Tensor  # [T, 2I], the largest activation of a dense layer


class MLP(NamedTuple):
    """I is this rank's part of the intermediate size."""

    gate_up: Param  # [2I, H]
    down: Param  # [H, I]
    act: Activation

    @classmethod
    def bind(cls, params: Params, prefix: str, model: ModelSpec) -> MLP:
        return cls(params[f"{prefix}.gate_up"], params[f"{prefix}.down"], model.hidden_act)

    def forward(
        self, context: LayerContext, sequence: SequenceContext, x: Tensor
    ) -> Task[tuple[Tensor, None, MLPRecomputable]]:
        full = yield from context.tp.all_gather(x)
        gate_up = torch.mm(full, self.gate_up.weight.t())
        y = yield from context.tp.matmul_reduce_scatter(glu(gate_up, self.act), self.down.weight.t())
        return y, None, MLPRecomputable(x, gate_up)

    def recompute(self, context: LayerContext, x: Tensor, saved: None) -> MLPRecomputable:
        return MLPRecomputable(x, torch.mm(context.tp.all_gather(x).wait(), self.gate_up.weight.t()))

    def backward(
        self, context: LayerContext, sequence: SequenceContext, saved: None, recomputable: MLPRecomputable, dy: Tensor
    ) -> Task[tuple[Tensor, list[Wgrad]]]:
        (x, gate_up), tp = recomputable, context.tp
        dy = yield from tp.all_gather(dy)
        dgate_up, gated = glu_backward(torch.mm(dy, self.down.weight), gate_up, self.act)
        x, dx = yield from gather2(tp.all_gather(x), tp.matmul_reduce_scatter(dgate_up, self.gate_up.weight))
        return dx, [LinearWgrad(self.down.gradient, dy, gated), LinearWgrad(self.gate_up.gradient, dgate_up, x)]
