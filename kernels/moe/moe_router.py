"""The router's arithmetic: from logits to chosen experts and their weights, and back.

T tokens, E experts, of which a token visits K. Scores and weights are float32 (float64 when compute is).
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from pentad.kernels.backend import triton_on_gpu

TINY = 1e-20  # keeps a sum of scores from being zero


class Gate(NamedTuple):
    """How experts are chosen; the names are those of the configuration."""

    top_k: int
    scoring_func: Literal["softmax", "sigmoid"] = "softmax"
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0
    num_groups: int = 1
    topk_groups: int = 1


@triton_on_gpu
def choose_experts(logits: Tensor, bias: Tensor | None, gate: Gate) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(scores [T, E], experts [T, K] int64, best first, their weights [T, K], visits of each expert [E] int64).

    `bias` [E] is added to the scores for the choice of experts, not for their weights (arXiv 2408.15664).
    """
    scores = logits.softmax(-1) if gate.scoring_func == "softmax" else logits.sigmoid()
    experts = top_experts(scores if bias is None else scores + bias, gate)
    weights = scores.gather(1, experts)
    if gate.norm_topk_prob:
        weights = weights / (weights.sum(1, keepdim=True) + TINY)
    visits = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, experts, True)
    return scores, experts, weights * gate.routed_scaling_factor, visits.sum(0)


@triton_on_gpu
def router_backward(
    scores: Tensor,
    experts: Tensor,
    weights: Tensor,
    dweights: Tensor,
    dshares: Tensor | None,
    logits: Tensor | None,
    z_scale: float,
    gate: Gate,
    dtype: torch.dtype,
) -> Tensor:
    """The gradient [T, E] of the logits, in `dtype`.

    `dweights` [T, K] is the gradient of the weights; `dshares` [E] that of every token's normalized scores; `z_scale`
    that of every token's squared log-sum-exp of its `logits`. Linear in all three, so partial sums of them give partial
    sums.
    """
    dchosen = dweights.to(scores.dtype) * gate.routed_scaling_factor
    if gate.norm_topk_prob:
        chosen = scores.gather(1, experts)
        mean = (dchosen * weights).sum(1, keepdim=True) / gate.routed_scaling_factor
        dchosen = (dchosen - mean) / (chosen.sum(1, keepdim=True) + TINY)
    dscores = torch.zeros_like(scores).scatter_(1, experts, dchosen)
    if dshares is not None:
        dscores += _normalize_backward(scores, gate, dshares)
    if gate.scoring_func == "softmax":
        dlogits = scores * (dscores - (dscores * scores).sum(1, keepdim=True))
    else:
        dlogits = scores * (1 - scores) * dscores
    if logits is not None:
        dlogits += 2 * z_scale * logits.logsumexp(1, keepdim=True) * logits.softmax(1)
    return dlogits.to(dtype)


def top_experts(scores: Tensor, gate: Gate) -> Tensor:
    """[T, K]: the experts with the highest scores [T, E], best first; among equal scores, the lowest index.

    With several groups, only experts in the `topk_groups` groups with the highest sums of their two best scores are
    eligible (DeepSeek-V3, arXiv 2412.19437, section 2.1.2).
    """
    if gate.num_groups > 1:
        grouped = scores.unflatten(1, (gate.num_groups, -1))  # [T, groups, E / groups]
        sums = grouped.topk(min(2, grouped.shape[2]), -1).values.sum(-1)
        allowed = torch.zeros_like(sums, dtype=torch.bool).scatter_(1, _top(sums, gate.topk_groups), True)
        scores = grouped.masked_fill(~allowed[..., None], float("-inf")).flatten(1)
    return _top(scores, gate.top_k)


def _top(scores: Tensor, count: int) -> Tensor:
    """Indices of the highest scores of each row. A stable sort, since topk leaves the order of equal scores open."""
    return scores.sort(dim=1, descending=True, stable=True).indices[:, :count].contiguous()


def _normalize_backward(scores: Tensor, gate: Gate, dshares: Tensor) -> Tensor:
    """The gradient of the scores [T, E] from that of score / sum of scores, [E] for every token."""
    if gate.scoring_func == "softmax":
        return dshares.expand_as(scores)
    total = scores.sum(1, keepdim=True) + TINY
    return (dshares - (dshares * scores).sum(1, keepdim=True) / total) / total
