"""The dense feed-forward sublayer: down(act(gate x) * up x), its intermediate size split over the tp ranks."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pentad.kernels.glu import Activation, glu, glu_backward
from pentad.schedules.spec.model import ModelSpec
from pentad.workers.linear.weight_grad import LinearWgrad, Param, Params, Wgrad
from pentad.workers.model.layer_context import LayerContext, SequenceContext
from pentad.workers.model.lora import Adapter, ColumnAdapters, RowAdapter
from pentad.workers.parallel.async_ops import Task, gather2, ready, run_to_completion


class MLP(NamedTuple):
    """I is this rank's part of the intermediate size. What is recomputable is gate_up [T, 2I], the largest activation
    of a dense layer."""

    gate_up: Param  # [2I, H]
    down: Param  # [H, I]
    act: Activation
    gate_up_adapters: ColumnAdapters = ColumnAdapters()
    down_adapter: RowAdapter = RowAdapter()

    @classmethod
    def bind(cls, params: Params, prefix: str, model: ModelSpec) -> MLP:
        gate_up, down = params[f"{prefix}.gate_up"], params[f"{prefix}.down"]
        hidden, width = down.weight.shape
        adapters = Adapter.bind_all(params, prefix, {"gate_proj": width, "up_proj": width})
        down_adapter = RowAdapter.bind(params, f"{prefix}.down_proj", hidden)
        return cls(gate_up, down, model.hidden_act, ColumnAdapters(adapters), down_adapter)

    def forward(self, context: LayerContext, sequence: SequenceContext, x: Tensor) -> Task[tuple[Tensor, None, Tensor]]:
        full = yield from context.tp.all_gather(x)
        gate_up = torch.mm(full, self.gate_up.weight.t())
        yield from self.gate_up_adapters.add_(context, x, gate_up)
        gated = glu(gate_up, self.act)
        y = yield from context.tp.matmul_reduce_scatter(gated, self.down.weight.t())
        yield from self.down_adapter.add_(context, gated, y)
        return y, None, gate_up

    def recompute(self, context: LayerContext, x: Tensor, saved: None) -> Tensor:
        gate_up = torch.mm(context.tp.all_gather(x).wait(), self.gate_up.weight.t())
        run_to_completion(self.gate_up_adapters.add_(context, x, gate_up))
        return gate_up

    def backward(
        self, context: LayerContext, sequence: SequenceContext, x: Tensor, saved: None, gate_up: Tensor, dy: Tensor
    ) -> Task[tuple[Tensor, list[Wgrad]]]:
        tp, local, local_dy = context.tp, x, dy
        dnarrow = yield from self.down_adapter.narrow_grad(context, dy)
        dy = yield from tp.all_gather(dy)
        dgated = torch.mm(dy, self.down.weight)
        self.down_adapter.input_grad_(dnarrow, dgated)
        dgate_up, gated = glu_backward(dgated, gate_up, self.act)
        del dgated  # free before the products
        adapters = yield from self.down_adapter.wgrads(context, gated, local_dy, dnarrow)
        gather = tp.all_gather(x) if self.gate_up.gradient is not None else ready(x)  # only W needs all rows
        x, dx = yield from gather2(gather, tp.matmul_reduce_scatter(dgate_up, self.gate_up.weight))
        adapters += yield from self.gate_up_adapters.backward_(context, local, dgate_up, dx)
        work = [LinearWgrad(self.down.gradient, dy, gated), LinearWgrad(self.gate_up.gradient, dgate_up, x)]
        return dx, [*work, *adapters]
