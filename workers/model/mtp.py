"""Multi-token prediction at the end of the model (DeepSeek-V3, arXiv 2412.19437, section 2.2).

Each MTP layer joins the normed stream before it with the embedding of the next token, and predicts the token after that
with the model's own head. T tokens of a slice, t of them in this rank's part of the residual stream, H hidden.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from pentad.schedules.spec.model import ModelSpec
from pentad.workers.linear.linear import Linear
from pentad.workers.linear.logit_chunks import TokenLoss
from pentad.workers.linear.weight_grad import LinearWgrad, Param, Params, Wgrad
from pentad.workers.model import lm_head
from pentad.workers.model.layer import Layer, LayerSaved
from pentad.workers.model.layer_context import LayerContext, SequenceContext
from pentad.workers.model.norm import Norm, SavedNorm
from pentad.workers.parallel.async_ops import run_to_completion


class MTPSaved(NamedTuple):
    """What B needs of F; norms have rows [t, H]."""

    tokens: Tensor  # [T], the tokens whose embeddings are joined
    embedding_norm: SavedNorm
    hidden_norm: SavedNorm
    joined: Tensor  # [t, 2H]
    saved: LayerSaved
    recomputable: Any  # of the feed-forward
    norm: SavedNorm
    loss: lm_head.LossSaved


class MTPLayer(NamedTuple):
    """`embedding` and `head` are the model's; products with the head are in the compute dtype."""

    hidden_norm: Norm  # [H]
    embedding_norm: Norm  # [H]
    norm: Norm  # [H]
    join: Param  # [H, 2H], embedding before stream
    layer: Layer
    embedding: Param  # [V / tp, H]
    head: Linear  # [V / tp, H]

    @classmethod
    def bind(cls, params: Params, model: ModelSpec, index: int, embedding: str, head: str) -> MTPLayer:
        """MTP layer `index`; `embedding` and `head` are the names that these have on this stage."""
        at, names = f"mtp.{index}", ("hidden_norm", "embedding_norm", "norm")
        norms = {name: Norm.bind(params, f"{at}.{name}", model) for name in names}
        layer = Layer.bind(params, model, model.layers + index)
        return cls(
            **norms, join=params[f"{at}.join"], layer=layer, embedding=params[embedding], head=Linear(params[head])
        )

    def forward(
        self,
        context: LayerContext,
        sequence: SequenceContext,
        hidden: Tensor,
        tokens: Tensor,
        targets: Tensor,
        *,
        has_backward: bool,
    ) -> tuple[Tensor, MTPSaved]:
        """(normed stream [t, H], what B needs) from the normed stream `hidden` [t, H] before this layer.

        `tokens` [T] are the next tokens, `targets` [T] the ones after them; -100 where a sequence has ended.
        """
        tp = context.tp
        tokens = tokens.clamp(min=0)  # the target of an unknown token is -100 too
        embedded, embedding_norm = self.embedding_norm.forward(lm_head.embed(self.embedding, tokens, tp))
        normed, hidden_norm = self.hidden_norm.forward(hidden)
        joined = torch.cat((embedded, normed), dim=1)
        branch, stream, saved, recomputable = run_to_completion(
            self.layer.forward(context, sequence, torch.mm(joined, self.join.weight.t()), None)
        )
        normed, last_norm = self.norm.forward(branch, stream)
        given = context.axes, _loss(context), context.logit_rows
        loss, _ = lm_head.head_loss(self.head, normed, targets, *given, has_backward=has_backward)
        return normed, MTPSaved(tokens, embedding_norm, hidden_norm, joined, saved, recomputable, last_norm, loss)

    def backward(
        self, context: LayerContext, sequence: SequenceContext, saved: MTPSaved, dnormed: Tensor | None
    ) -> tuple[Tensor, list[Wgrad]]:
        """(gradient of `hidden` [t, H], work for W); `dnormed` [t, H] is the next MTP layer's contribution, if there is
        one."""
        given = context.axes, _loss(context), context.logit_rows
        dhead, head_work = lm_head.head_loss_backward(self.head, saved.loss, *given)
        dhead = dhead if dnormed is None else dhead + dnormed
        dstream, last_norm = self.norm.backward(dhead, saved.norm)
        djoin, layer_work = run_to_completion(
            self.layer.backward(context, sequence, saved.saved, saved.recomputable, dstream)
        )
        dembedded, dhidden = (half.contiguous() for half in torch.mm(djoin, self.join.weight).chunk(2, dim=1))
        dembedding, embedding_norm = self.embedding_norm.backward(dembedded, saved.embedding_norm)
        dhidden, hidden_norm = self.hidden_norm.backward(dhidden, saved.hidden_norm)
        join = LinearWgrad(self.join.gradient, djoin, saved.joined)
        embedding = lm_head.embed_backward(self.embedding, dembedding, saved.tokens, context.tp)
        return dhidden, [head_work, *layer_work, join, last_norm, embedding_norm, hidden_norm, embedding]


def _loss(context: LayerContext) -> TokenLoss:
    """The losses of all MTP layers together have the weight `mtp_loss_weight`."""
    return TokenLoss(context.loss_scale * context.model.mtp_loss_weight / context.model.mtp_layers)
