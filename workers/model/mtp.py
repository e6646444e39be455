"""Layers that predict tokens beyond the next one, at the end of the model (DeepSeek-V3, arXiv 2412.19437, 2.2).

Each joins the normed stream before it with the embedding of the token that stands one further, and has the model's own
head behind it. T tokens of a piece, t of them in this rank's part of the stream, H hidden.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from pentad.kernels.rms_norm import rms_norm, rms_norm_backward
from pentad.schedules.spec.model import ModelShape
from pentad.workers.model import layer, lm_head
from pentad.workers.model.layer_context import Around, Place, Views
from pentad.workers.model.weight_grad import Deferred, Product, Sum
from pentad.workers.parallel.async_ops import run_to_completion


class Weights(NamedTuple):
    """Of one such layer; `embedding` and `words` are the model's."""

    hidden_norm: torch.Tensor  # [H]
    embedding_norm: torch.Tensor  # [H]
    join: torch.Tensor  # [H, 2H], of the embedding and then the stream
    norm: torch.Tensor  # [H]
    layer: layer.Weights
    embedding: torch.Tensor  # [V / tp, H]
    words: torch.Tensor  # [V / tp, H]


class Normed(NamedTuple):
    entry: torch.Tensor  # [t, H]
    scale: torch.Tensor  # [t]


class Saved(NamedTuple):
    """What B needs of F."""

    tokens: torch.Tensor  # [T], the ones joined
    embedding: Normed
    hidden: Normed
    joined: torch.Tensor  # [t, 2H]
    roots: layer.Roots
    leaves: layer.Leaves
    end: Normed
    scores: lm_head.Scores


def weights_of(views: Views, model: ModelShape, number: int, names: tuple[str, str]) -> Weights:
    """`names` are those of the embedding and the head on this stage."""
    at, index = f"predicted.{number}", model.layers + number
    hidden, embedded, join, norm = (views[f"{at}.{name}"] for name in ("hidden_norm", "embedding_norm", "join", "norm"))
    made = layer.weights_of(views, index, layer.halves_of(model, index))
    embedding, words = (views[name] for name in names)
    return Weights(hidden, embedded, join, norm, made, embedding, words)


def forward(
    w: Weights,
    halves: layer.Halves,
    around: Around,
    place: Place,
    hidden: torch.Tensor,
    tokens: torch.Tensor,
    targets: torch.Tensor,
) -> tuple[torch.Tensor, Saved]:
    """(normed stream, what B needs) from the normed stream `hidden` [t, H] before it, the `tokens` [T] that follow and
    the `targets` [T] behind those; of each -100 are not known, and no target then is."""
    eps = around.model.norm_eps
    known = tokens.clamp(min=0)
    embedded, *embedding = rms_norm(lm_head.embed(w.embedding, known, around.tensor), w.embedding_norm, eps)
    before, *stream = rms_norm(hidden, w.hidden_norm, eps)
    joined = torch.cat((embedded, before), dim=1)
    branch, middle, roots, leaves = run_to_completion(
        layer.forward(w.layer, halves, around, place, torch.mm(joined, w.join.t()), None)
    )
    normed, *end = rms_norm(branch, w.norm, eps, middle)
    scores, _ = lm_head.score(w.words, normed, targets, around.tensor)
    return normed, Saved(known, Normed(*embedding), Normed(*stream), joined, roots, leaves, Normed(*end), scores)


def backward(
    w: Weights,
    g: Weights,
    halves: layer.Halves,
    around: Around,
    place: Place,
    saved: Saved,
    dnormed: torch.Tensor | None,
) -> tuple[torch.Tensor, list[Deferred]]:
    """(gradient of `hidden`, what W has to do); `dnormed` [t, H] is what a further layer gives to the normed stream. A
    token's loss counts `predicted_weight` over the number of such layers."""
    model, tensor = around.model, around.tensor
    scale = around.loss_scale * model.mtp_loss_weight / model.mtp_layers
    dend, work = lm_head.score_backward(w.words, g.words, saved.scores, scale, tensor)
    dend = dend if dnormed is None else dend + dnormed
    dstream, dnorm = rms_norm_backward(dend, saved.end.entry, w.norm, saved.end.scale)
    turns = layer.backward(w.layer, g.layer, halves, around, place, saved.roots, saved.leaves, dstream)
    dentry, more = run_to_completion(turns)
    dembedded, dbefore = (half.contiguous() for half in torch.mm(dentry, w.join).chunk(2, dim=1))
    dtoken, dembedding_norm = rms_norm_backward(
        dembedded, saved.embedding.entry, w.embedding_norm, saved.embedding.scale
    )
    dhidden, dhidden_norm = rms_norm_backward(dbefore, saved.hidden.entry, w.hidden_norm, saved.hidden.scale)
    norms = Sum(g.norm, dnorm), Sum(g.embedding_norm, dembedding_norm), Sum(g.hidden_norm, dhidden_norm)
    lookup = lm_head.embed_backward(g.embedding, dtoken, saved.tokens, tensor)
    return dhidden, [*work, *more, Product(g.join, dentry, saved.joined), *norms, *lookup]
