"""Multi-token prediction at the end of the model (DeepSeek-V3, arXiv 2412.19437, section 2.2).

Each MTP layer joins the normed stream before it with the embedding of the next token, and predicts the token after that
with the model's own head. T tokens of a slice, t of them in this rank's part of the residual stream, H hidden.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pentad.kernels.rms_norm import rms_norm, rms_norm_backward
from pentad.schedules.spec.model import ModelSpec
from pentad.workers.model import layer, lm_head
from pentad.workers.model.layer_context import LayerContext, SequenceContext, Views
from pentad.workers.model.weight_grad import AddWgrad, LinearWgrad, Wgrad
from pentad.workers.parallel.async_ops import run_to_completion


class MTPWeights(NamedTuple):
    """Weights of one MTP layer; `embedding` and `head` are the model's."""

    hidden_norm: Tensor  # [H]
    embedding_norm: Tensor  # [H]
    join: Tensor  # [H, 2H], of the embedding and then the stream
    norm: Tensor  # [H]
    layer: layer.LayerWeights
    embedding: Tensor  # [V / tp, H]
    head: Tensor  # [V / tp, H]


class SavedNorm(NamedTuple):
    input: Tensor  # [t, H]
    rstd: Tensor  # [t]


class MTPSaved(NamedTuple):
    """What B needs of F."""

    tokens: Tensor  # [T], whose embeddings are joined
    embedding_norm: SavedNorm
    hidden_norm: SavedNorm
    joined: Tensor  # [t, 2H]
    saved: layer.LayerSaved
    recomputable: layer.LayerRecomputable
    norm: SavedNorm
    loss: lm_head.LossSaved


def weights_of(views: Views, model: ModelSpec, index: int, embedding: str, head: str) -> MTPWeights:
    """Weights of MTP layer `index`; the last two are the names of the embedding and the head on this stage."""
    prefix, layer_index = f"predicted.{index}", model.layers + index
    return MTPWeights(
        views[f"{prefix}.hidden_norm"],
        views[f"{prefix}.embedding_norm"],
        views[f"{prefix}.join"],
        views[f"{prefix}.norm"],
        layer.weights_of(views, layer_index, layer.sublayers_of(model, layer_index)),
        views[embedding],
        views[head],
    )


def forward(
    w: MTPWeights,
    sublayers: layer.Sublayers,
    context: LayerContext,
    sequence: SequenceContext,
    hidden: Tensor,
    tokens: Tensor,
    targets: Tensor,
) -> tuple[Tensor, MTPSaved]:
    """(normed stream [t, H], what B needs) from the normed stream `hidden` [t, H] before this layer.

    `tokens` [T] are the next tokens, `targets` [T] the ones after them; -100 where a sequence has ended.
    """
    eps, tp = context.model.norm_eps, context.tp
    tokens = tokens.clamp(min=0)  # the target of an unknown token is -100 too
    embedded, *embedding_norm = rms_norm(lm_head.embed(w.embedding, tokens, tp), w.embedding_norm, eps)
    normed, *hidden_norm = rms_norm(hidden, w.hidden_norm, eps)
    joined = torch.cat((embedded, normed), dim=1)
    branch, stream, saved, recomputable = run_to_completion(
        layer.forward(w.layer, sublayers, context, sequence, torch.mm(joined, w.join.t()), None)
    )
    normed, *norm = rms_norm(branch, w.norm, eps, stream)
    loss, _ = lm_head.head_loss(w.head, normed, targets, tp)
    norms = SavedNorm(*embedding_norm), SavedNorm(*hidden_norm)
    return normed, MTPSaved(tokens, *norms, joined, saved, recomputable, SavedNorm(*norm), loss)


def backward(
    w: MTPWeights,
    g: MTPWeights,
    sublayers: layer.Sublayers,
    context: LayerContext,
    sequence: SequenceContext,
    saved: MTPSaved,
    dnormed: Tensor | None,
) -> tuple[Tensor, list[Wgrad]]:
    """(gradient of `hidden` [t, H], work for W); `dnormed` [t, H] is what the next MTP layer contributes, if any.

    The losses of all MTP layers together weigh `mtp_loss_weight`.
    """
    model, tp = context.model, context.tp
    scale = context.loss_scale * model.mtp_loss_weight / model.mtp_layers
    dhead, head_work = lm_head.head_loss_backward(w.head, g.head, saved.loss, scale, tp)
    dhead = dhead if dnormed is None else dhead + dnormed
    dstream, dnorm = rms_norm_backward(dhead, saved.norm.input, w.norm, saved.norm.rstd)
    djoin, layer_work = run_to_completion(
        layer.backward(w.layer, g.layer, sublayers, context, sequence, saved.saved, saved.recomputable, dstream)
    )
    dembedded, dhidden = (half.contiguous() for half in torch.mm(djoin, w.join).chunk(2, dim=1))
    norm = saved.embedding_norm
    dembedding, dembedding_norm = rms_norm_backward(dembedded, norm.input, w.embedding_norm, norm.rstd)
    norm = saved.hidden_norm
    dhidden, dhidden_norm = rms_norm_backward(dhidden, norm.input, w.hidden_norm, norm.rstd)
    return dhidden, [
        *head_work,
        *layer_work,
        LinearWgrad(g.join, djoin, saved.joined),
        AddWgrad(g.norm, dnorm),
        AddWgrad(g.embedding_norm, dembedding_norm),
        AddWgrad(g.hidden_norm, dhidden_norm),
        *lm_head.embed_backward(g.embedding, dembedding, saved.tokens, tp),
    ]
