"""The router: which experts a token visits and with what weights, with a hand-written backward.

T tokens, H hidden, E experts, of which a token visits K. Scores and weights are float32 (float64 when compute is).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pentad.kernels.backend import accumulation_dtype
from pentad.schedules.spec.model import Experts

TINY = 1e-20  # keeps a sum of scores from being zero


class Routing(NamedTuple):
    """Where tokens go, which B needs again."""

    scores: Tensor  # [T, E], softmax or sigmoid of the logits
    experts: Tensor  # [T, K] int64, best first
    weights: Tensor  # [T, K]
    load: Tensor  # [E] int64, tokens that visit each expert
    logits: Tensor | None = None  # [T, E], for a z-loss


def route(x: Tensor, router: Tensor, bias: Tensor | None, shape: Experts, router_bias: Tensor | None = None) -> Routing:
    """Routes tokens x [T, H] by `router` [E, H].

    `bias` [E] is added to the scores for the choice of experts, not for their weights (arXiv 2408.15664), `router_bias`
    [E] to the logits.
    """
    logits = router_logits(x, router)
    if router_bias is not None:
        logits = logits + router_bias
    scores = logits.softmax(-1) if shape.scoring_func == "softmax" else logits.sigmoid()
    experts = top_experts(scores if bias is None else scores + bias, shape)
    weights = scores.gather(1, experts)
    if shape.norm_topk_prob:
        weights = weights / (weights.sum(1, keepdim=True) + TINY)
    visits = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, experts, True)
    kept = logits if shape.router_z_loss_coef else None
    return Routing(scores, experts, weights * shape.routed_scaling_factor, visits.sum(0), kept)


def router_logits(x: Tensor, router: Tensor) -> Tensor:
    """[T, E], never rounded to 16 bits."""
    wide = accumulation_dtype(x.dtype)
    if x.is_cuda and x.dtype != wide:
        return torch.mm(x, router.t(), out_dtype=wide)
    return torch.mm(x.to(wide), router.to(wide).t())


def top_experts(scores: Tensor, shape: Experts) -> Tensor:
    """[T, K]: the experts with the highest scores [T, E], best first; among equal scores, the lowest index.

    With several groups, only experts in the `topk_groups` groups with the highest sums of their two best scores are
    eligible (DeepSeek-V3, arXiv 2412.19437, section 2.1.2).
    """
    if shape.num_groups > 1:
        grouped = scores.unflatten(1, (shape.num_groups, -1))  # [T, groups, E / groups]
        sums = grouped.topk(min(2, grouped.shape[2]), -1).values.sum(-1)
        allowed = torch.zeros_like(sums, dtype=torch.bool).scatter_(1, _top(sums, shape.topk_groups), True)
        scores = grouped.masked_fill(~allowed[..., None], float("-inf")).flatten(1)
    return _top(scores, shape.top_k)


def _top(scores: Tensor, count: int) -> Tensor:
    """Indices of the highest scores of each row. A stable sort, since topk leaves the order of equal scores open."""
    return scores.sort(dim=1, descending=True, stable=True).indices[:, :count].contiguous()


def backward(
    routing: Routing, router: Tensor, shape: Experts, dweights: Tensor, dshares: Tensor | None, z_scale: float = 0.0
) -> tuple[Tensor, Tensor]:
    """(dlogits [T, E], the router's part of dx [T, H]), both in the router's dtype.

    `dweights` [T, K] is the gradient of the weights; `dshares` [E], from `aux_loss_grad`, that of every token's
    normalized scores; `z_scale` is that of every token's squared log-sum-exp. Linear in all three, so partial sums of
    them give partial sums.
    """
    scores, experts, weights, *_ = routing
    dchosen = dweights.to(scores.dtype) * shape.routed_scaling_factor
    if shape.norm_topk_prob:
        chosen = scores.gather(1, experts)
        mean = (dchosen * weights).sum(1, keepdim=True) / shape.routed_scaling_factor
        dchosen = (dchosen - mean) / (chosen.sum(1, keepdim=True) + TINY)
    dscores = torch.zeros_like(scores).scatter_(1, experts, dchosen)
    if dshares is not None:
        dscores += _normalize_backward(scores, shape, dshares)
    if shape.scoring_func == "softmax":
        dlogits = scores * (dscores - (dscores * scores).sum(1, keepdim=True))
    else:
        dlogits = scores * (1 - scores) * dscores
    if routing.logits is not None:
        dlogits += 2 * z_scale * routing.logits.logsumexp(1, keepdim=True) * routing.logits.softmax(1)
    dlogits = dlogits.to(router.dtype)
    return dlogits, torch.mm(dlogits, router)


def _normalize_backward(scores: Tensor, shape: Experts, dshares: Tensor) -> Tensor:
    """The gradient of the scores [T, E] from that of score / sum of scores, [E] for every token."""
    if shape.scoring_func == "softmax":
        return dshares.expand_as(scores)
    total = scores.sum(1, keepdim=True) + TINY
    return (dshares - (dshares * scores).sum(1, keepdim=True) / total) / total


def aux_loss_grad(routing: Routing, shape: Experts, scale: float, load: Tensor | None = None) -> Tensor:
    """[E]: the gradient of (tokens x scale) times the load-balancing loss for a token's normalized scores.

    It is the same for every token. The loss of a microbatch is aux_loss_coef E sum_e (share of visits of expert e)
    (mean normalized score of e), which is aux_loss_coef at an even load (Switch Transformers, arXiv 2101.03961, section
    2.2). With a scale of 1 / tokens of a step, a step's loss is the mean over its microbatches. `load` [E] counts the
    visits of the full microbatch where these tokens are only a part of it. Counts have no gradient.
    """
    counts = (routing.load if load is None else load).to(routing.scores.dtype)
    visits = counts / counts.sum()
    return visits * (shape.aux_loss_coef * shape.num_experts * scale)
