"""The dense feed-forward sublayer: down(act(gate x) * up x), its intermediate size split over the tp ranks."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from pentad.kernels.glu import Activation
from pentad.schedules.spec.model import ModelSpec
from pentad.workers.linear.casts import Casts, Operand
from pentad.workers.linear.linear import Linear, gather
from pentad.workers.linear.weight_grad import Params, Wgrad
from pentad.workers.model.layer_context import LayerContext, SequenceContext
from pentad.workers.model.lora import ColumnAdapters, RowAdapter
from pentad.workers.parallel.async_ops import Task, gather2, ready, run_to_completion


class MLP(NamedTuple):
    """I is this rank's part of the intermediate size. gate_up [T, 2I], the largest activation of a dense layer, is
    recomputable."""

    gate_up: Linear  # [2I, H]
    down: Linear  # [H, I]
    act: Activation
    gate_up_adapters: ColumnAdapters = ColumnAdapters()
    down_adapter: RowAdapter = RowAdapter()

    @classmethod
    def bind(cls, params: Params, prefix: str, model: ModelSpec, casts: Casts | None = None) -> MLP:
        gate_up = Linear.bind(params, f"{prefix}.gate_up", casts)
        down = Linear.bind(params, f"{prefix}.down", casts, row_parallel=True)
        hidden, width = down.weight.shape
        adapters = ColumnAdapters.bind(params, prefix, {"gate_proj": width, "up_proj": width}, "gate_up_proj")
        down_adapter = RowAdapter.bind(params, f"{prefix}.down_proj", hidden)
        return cls(gate_up, down, model.hidden_act, adapters, down_adapter)

    @property
    def caster(self) -> Linear | None:
        return None if self.gate_up.casts is None else self.gate_up

    def only_w_reads(self, context: LayerContext) -> bool:
        return context.tp.size == 1 and self.gate_up.casts is None and not self.gate_up_adapters.adapters

    def forward(
        self, context: LayerContext, sequence: SequenceContext, x: Operand
    ) -> Task[tuple[Tensor, None, Tensor]]:
        axes = context.axes
        gate_up = yield from self.gate_up.forward_gathered(axes, x)
        yield from self.gate_up_adapters.add_(context, x, gate_up)
        gated = self.down.glu(axes, gate_up, self.act)
        y = yield from self.down.forward_scattered(axes, gated)
        yield from self.down_adapter.add_(context, gated, y)
        return y, None, gate_up

    def recompute(self, context: LayerContext, x: Operand, saved: None) -> Tensor:
        axes = context.axes
        gate_up = self.gate_up.forward_gathered(axes, x).wait()
        run_to_completion(self.gate_up_adapters.add_(context, x, gate_up))
        return gate_up

    def backward(
        self, context: LayerContext, sequence: SequenceContext, x: Operand, saved: None, gate_up: Tensor, dy: Tensor
    ) -> Task[tuple[Tensor, list[Wgrad]]]:
        axes, local, local_dy = context.axes, x, dy
        dnarrow = yield from self.down_adapter.narrow_grad(context, dy)
        doutput, dgated = yield from self.down.input_grad_gathered(axes, dy)
        del dy
        self.down_adapter.input_grad_(dnarrow, dgated)
        dgate_up, gated = self.down.glu_backward(axes, dgated, gate_up, self.act, self.gate_up.name)
        del dgated  # free it before the products
        adapters = yield from self.down_adapter.wgrads(context, gated, local_dy, dnarrow)
        rows = gather(axes, x) if self.gate_up.gradient is not None else ready(x)  # only W needs all rows
        x, dx = yield from gather2(rows, self.gate_up.input_grad_scattered(axes, dgate_up))
        adapters += yield from self.gate_up_adapters.backward_(context, local, dgate_up, dx)
        x = self.gate_up.input(axes, x, columns=True)
        work = [self.down.wgrad(doutput, gated), self.gate_up.wgrad(dgate_up, x)]
        return dx, [*work, *adapters]
