"""Which experts a token visits and with what weights, with the backward pass written out.

T tokens, H hidden, E experts, K of which a token visits. Scores and weights are float32 (float64 when compute is).
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from pentad.kernels.backend import accumulator
from pentad.schedules.spec.model import Experts

TINY = 1e-20  # keeps a sum of scores from being zero


class Routed(NamedTuple):
    """Where tokens go: what F has to keep of the router."""

    scores: torch.Tensor  # [T, E], softmax or sigmoid of the router's products
    experts: torch.Tensor  # [T, K] int64, the best one first
    weights: torch.Tensor  # [T, K]
    load: torch.Tensor  # [E] int64, how many of these tokens visit each expert


def route(normed: torch.Tensor, router: torch.Tensor, bias: torch.Tensor | None, shape: Experts) -> Routed:
    """Routes tokens `normed` [T, H] by `router` [E, H]; `bias` [E] counts for the choice, not for the weights
    (arXiv 2408.15664)."""
    products = logits(normed, router)
    scores = products.softmax(-1) if shape.scoring_func == "softmax" else products.sigmoid()
    experts = choose(scores if bias is None else scores + bias, shape)
    weights = scores.gather(1, experts)
    if shape.norm_topk_prob:
        weights = weights / (weights.sum(1, keepdim=True) + TINY)
    visits = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, experts, True)
    return Routed(scores, experts, weights * shape.routed_scaling_factor, visits.sum(0))


def logits(normed: torch.Tensor, router: torch.Tensor) -> torch.Tensor:
    """[T, E]: the router's products, which are not rounded to 16 bits."""
    wide = accumulator(normed.dtype)
    if normed.is_cuda and normed.dtype != wide:
        return torch.mm(normed, router.t(), out_dtype=wide)
    return torch.mm(normed.to(wide), router.to(wide).t())


def choose(scores: torch.Tensor, shape: Experts) -> torch.Tensor:
    """[T, K]: the experts with the highest scores [T, E], best first; of equal ones that with the lowest number.

    Of `groups` only the `active_groups` count whose two best scores have the highest sums (arXiv 2412.19437, 2.1.2).
    """
    if shape.num_groups > 1:
        grouped = scores.unflatten(1, (shape.num_groups, -1))  # [T, groups, E / groups]
        sums = grouped.topk(min(2, grouped.shape[2]), -1).values.sum(-1)
        allowed = torch.zeros_like(sums, dtype=torch.bool).scatter_(1, _best(sums, shape.topk_groups), True)
        scores = grouped.masked_fill(~allowed[..., None], float("-inf")).flatten(1)
    return _best(scores, shape.top_k)


def _best(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Places of the highest scores of each row; a stable sort, as topk promises nothing about equal ones."""
    return scores.sort(dim=1, descending=True, stable=True).indices[:, :count].contiguous()


def backward(
    routed: Routed, router: torch.Tensor, shape: Experts, dweights: torch.Tensor, pull: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(dlogits [T, E], their part of the gradient of the tokens [T, H]), in the router's dtype, from that of the
    weights [T, K] and from `pull` [E], that of every token's probabilities by the balance loss.

    Linear in both: parts of a sum give parts of a sum.
    """
    scores, experts, weights, _ = routed
    dchosen = dweights.to(scores.dtype) * shape.routed_scaling_factor
    if shape.norm_topk_prob:
        chosen = scores.gather(1, experts)
        mean = (dchosen * weights).sum(1, keepdim=True) / shape.routed_scaling_factor
        dchosen = (dchosen - mean) / (chosen.sum(1, keepdim=True) + TINY)
    dscores = torch.zeros_like(scores).scatter_(1, experts, dchosen)
    if pull is not None:
        dscores += _of_shares(scores, shape, pull)
    if shape.scoring_func == "softmax":
        dlogits = scores * (dscores - (dscores * scores).sum(1, keepdim=True))
    else:
        dlogits = scores * (1 - scores) * dscores
    dlogits = dlogits.to(router.dtype)
    return dlogits, torch.mm(dlogits, router)


def _of_shares(scores: torch.Tensor, shape: Experts, pull: torch.Tensor) -> torch.Tensor:
    """The gradient of the scores from that of their shares, which is the same [E] for every token."""
    if shape.scoring_func == "softmax":
        return pull.expand_as(scores)
    total = scores.sum(1, keepdim=True) + TINY
    return (pull - (pull * scores).sum(1, keepdim=True) / total) / total


def balance_loss(routed: Routed, shape: Experts, load: torch.Tensor | None = None) -> torch.Tensor:
    """auxiliary x E x the sum over the experts of (share of the visits) x (mean share of the scores), a scalar
    (arXiv 2101.03961, 2.2): `auxiliary` where the load is even, whatever K is.

    `load` [E] counts a whole microbatch where these tokens are a part of it; the mean over equal parts is its loss.
    """
    scores = routed.scores
    shares = scores if shape.scoring_func == "softmax" else scores / (scores.sum(1, keepdim=True) + TINY)
    return (aux_loss_grad(routed, shape, 1.0, load) * shares.mean(0)).sum()


def aux_loss_grad(routed: Routed, shape: Experts, scale: float, load: torch.Tensor | None = None) -> torch.Tensor:
    """[E]: the gradient of (tokens x scale) times the balance loss with respect to a token's shares. With 1 / (tokens
    of a step) as `scale` a step's balance loss is the mean of those of its tokens' microbatches. `load` as in
    `balance_loss`. Counts have no gradient."""
    counts = (routed.load if load is None else load).to(routed.scores.dtype)
    visits = counts / counts.sum()
    return visits * (shape.aux_loss_coef * shape.num_experts * scale)
