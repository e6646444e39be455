"""A decoder layer with a hand-written backward: F, B and W are three calls without autograd between them.

Two sublayers, attention and feed-forward, each after an RMSNorm and added to the residual stream. T tokens of this
rank's part of the stream, H hidden.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from pentad.kernels.rms_norm import rms_norm, rms_norm_backward
from pentad.schedules.spec.model import ModelSpec
from pentad.workers.model import attention, mla, mlp, moe
from pentad.workers.model.layer_context import LayerContext, SequenceContext, Sublayer, Views
from pentad.workers.model.weight_grad import AddWgrad, Wgrad
from pentad.workers.parallel.async_ops import Task


class LayerWeights(NamedTuple):
    """Compute weights, or their main gradients."""

    attention_norm: Tensor  # [H]
    attention: Any
    mlp_norm: Tensor  # [H]
    mlp: Any


class LayerSaved(NamedTuple):
    """Activations that B needs and RECOMPUTE cannot rebuild cheaply."""

    stream: Tensor  # [T, H] residual stream before attention
    rstd: Tensor  # [T]
    attention: Any
    mlp_stream: Tensor  # [T, H] residual stream before the feed-forward sublayer
    mlp_rstd: Tensor  # [T]
    mlp: Any


class LayerRecomputable(NamedTuple):
    """Activations that `recompute` rebuilds from the saved ones: the two norms, and those of the sublayers."""

    normed: Tensor  # [T, H]
    attention: Any
    mlp_normed: Tensor  # [T, H]
    mlp: Any


class Sublayers(NamedTuple):
    attention: Sublayer
    mlp: Sublayer


def sublayers_of(model: ModelSpec, layer: int) -> Sublayers:
    has_experts = model.experts is not None and layer >= model.experts.first_k_dense
    return Sublayers(attention if model.mla is None else mla, moe if has_experts else mlp)


def weights_of(views: Views, layer: int, sublayers: Sublayers) -> LayerWeights:
    prefix = f"layers.{layer}"
    return LayerWeights(
        views[f"{prefix}.attention_norm"],
        sublayers.attention.weights_of(views, prefix),
        views[f"{prefix}.mlp_norm"],
        sublayers.mlp.weights_of(views, prefix),
    )


def forward(
    w: LayerWeights,
    sublayers: Sublayers,
    context: LayerContext,
    sequence: SequenceContext,
    branch: Tensor,
    stream: Tensor | None,
) -> Task[tuple[Tensor, Tensor, LayerSaved, LayerRecomputable]]:
    """(branch, stream, saved, recomputable); the residual stream is `branch` + `stream`, both [T, H], before and after.

    They are added inside the next norm, which reads both anyway.
    """
    eps = context.model.norm_eps
    normed, stream, rstd = rms_norm(branch, w.attention_norm, eps, stream)
    branch, *attended = yield from sublayers.attention.forward(w.attention, context, sequence, normed)
    mlp_normed, mlp_stream, mlp_rstd = rms_norm(branch, w.mlp_norm, eps, stream)
    branch, *transformed = yield from sublayers.mlp.forward(w.mlp, context, sequence, mlp_normed)
    saved = LayerSaved(stream, rstd, attended[0], mlp_stream, mlp_rstd, transformed[0])
    return branch, mlp_stream, saved, LayerRecomputable(normed, attended[1], mlp_normed, transformed[1])


def recompute(w: LayerWeights, sublayers: Sublayers, context: LayerContext, saved: LayerSaved) -> LayerRecomputable:
    """RECOMPUTE, by the kernels of the forward."""
    eps = context.model.norm_eps
    normed, _, _ = rms_norm(saved.stream, w.attention_norm, eps)
    attention = sublayers.attention.recompute(w.attention, context, normed, saved.attention)
    mlp_normed, _, _ = rms_norm(saved.mlp_stream, w.mlp_norm, eps)
    return LayerRecomputable(
        normed, attention, mlp_normed, sublayers.mlp.recompute(w.mlp, context, mlp_normed, saved.mlp)
    )


def backward(
    w: LayerWeights,
    g: LayerWeights,
    sublayers: Sublayers,
    context: LayerContext,
    sequence: SequenceContext,
    saved: LayerSaved,
    recomputable: LayerRecomputable,
    dy: Tensor,
) -> Task[tuple[Tensor, list[Wgrad]]]:
    """B: (gradient of the residual stream before the layer, work for W) from the gradient after it, both [T, H].

    `w` are compute weights, `g` their main gradients.
    """
    dnormed, mlp_work = yield from sublayers.mlp.backward(
        w.mlp, g.mlp, context, sequence, recomputable.mlp_normed, saved.mlp, recomputable.mlp, dy
    )
    dy, dmlp_norm = rms_norm_backward(dnormed, saved.mlp_stream, w.mlp_norm, saved.mlp_rstd, dy)
    mlp_work = [*mlp_work, AddWgrad(g.mlp_norm, dmlp_norm)]
    dnormed, attention_work = yield from sublayers.attention.backward(
        w.attention, g.attention, context, sequence, recomputable.normed, saved.attention, recomputable.attention, dy
    )
    dy, dnorm = rms_norm_backward(dnormed, saved.stream, w.attention_norm, saved.rstd, dy)
    return dy, [*mlp_work, *attention_work, AddWgrad(g.attention_norm, dnorm)]
