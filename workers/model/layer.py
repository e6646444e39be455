"""A decoder layer with a hand-written backward: F, B and W are three calls without autograd between them.

Two sublayers, attention and feed-forward, each after an RMSNorm and added to the residual stream. T tokens of this
rank's part of the stream, H hidden.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from pentad.schedules.spec.model import ModelSpec
from pentad.workers.model.attention import Attention
from pentad.workers.model.layer_context import LayerContext, SequenceContext, Sublayer
from pentad.workers.model.mla import MLA
from pentad.workers.model.mlp import MLP
from pentad.workers.model.moe import MoE
from pentad.workers.model.norm import SavedNorm, norm, norm_backward
from pentad.workers.model.weight_grad import Param, Params, Wgrad
from pentad.workers.parallel.async_ops import Task


class LayerSaved(NamedTuple):
    """Activations that B needs and RECOMPUTE cannot rebuild cheaply; the norms' inputs are the residual stream."""

    attention_norm: SavedNorm  # of rows [T, H]
    attention: Any
    mlp_norm: SavedNorm  # of rows [T, H]
    mlp: Any


class LayerRecomputable(NamedTuple):
    """Activations of the sublayers that `recompute` rebuilds from the saved ones, their inputs among them."""

    attention: Any
    mlp: Any


class Layer(NamedTuple):
    attention_norm: Param  # [H]
    attention: Sublayer
    mlp_norm: Param  # [H]
    mlp: Sublayer

    @classmethod
    def bind(cls, params: Params, model: ModelSpec, number: int) -> Layer:
        """Layer `number` of a model, with its part of the parameters."""
        prefix = f"layers.{number}"
        has_experts = model.experts is not None and number >= model.experts.first_k_dense
        attention = Attention.bind(params, prefix) if model.mla is None else MLA.bind(params, prefix)
        mlp = MoE.bind(params, prefix) if has_experts else MLP.bind(params, f"{prefix}.mlp")
        return cls(params[f"{prefix}.attention_norm"], attention, params[f"{prefix}.mlp_norm"], mlp)

    def forward(
        self, context: LayerContext, sequence: SequenceContext, branch: Tensor, stream: Tensor | None
    ) -> Task[tuple[Tensor, Tensor, LayerSaved, LayerRecomputable]]:
        """(branch, stream, saved, recomputable); the residual stream is `branch` + `stream`, both [T, H], before and
        after.

        They are added inside the next norm, which reads both anyway.
        """
        eps = context.model.norm_eps
        x, attention_norm = norm(branch, self.attention_norm, eps, stream)
        branch, *attention = yield from self.attention.forward(context, sequence, x)
        x, mlp_norm = norm(branch, self.mlp_norm, eps, attention_norm.input)
        branch, *mlp = yield from self.mlp.forward(context, sequence, x)
        saved = LayerSaved(attention_norm, attention[0], mlp_norm, mlp[0])
        return branch, mlp_norm.input, saved, LayerRecomputable(attention[1], mlp[1])

    def recompute(self, context: LayerContext, saved: LayerSaved) -> LayerRecomputable:
        """RECOMPUTE, by the kernels of the forward."""
        eps = context.model.norm_eps
        x, _ = norm(saved.attention_norm.input, self.attention_norm, eps)
        attention = self.attention.recompute(context, x, saved.attention)
        x, _ = norm(saved.mlp_norm.input, self.mlp_norm, eps)
        return LayerRecomputable(attention, self.mlp.recompute(context, x, saved.mlp))

    def backward(
        self,
        context: LayerContext,
        sequence: SequenceContext,
        saved: LayerSaved,
        recomputable: LayerRecomputable,
        dy: Tensor,
    ) -> Task[tuple[Tensor, list[Wgrad]]]:
        """B: (gradient of the residual stream before the layer, work for W) from the gradient after it, both [T, H]."""
        dx, mlp_work = yield from self.mlp.backward(context, sequence, saved.mlp, recomputable.mlp, dy)
        dy, mlp_norm = norm_backward(dx, self.mlp_norm, saved.mlp_norm, dy)
        dx, attention_work = yield from self.attention.backward(
            context, sequence, saved.attention, recomputable.attention, dy
        )
        dy, attention_norm = norm_backward(dx, self.attention_norm, saved.attention_norm, dy)
        return dy, [*mlp_work, mlp_norm, *attention_work, attention_norm]
