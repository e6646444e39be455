"""The router: which experts a token visits and with what weights, with a hand-written backward.

T tokens, H hidden, E experts, of which a token visits K. Scores and weights are float32 (float64 when compute is).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pentad.kernels.backend import accumulation_dtype
from pentad.kernels.moe.moe_router import Gate, choose_experts, router_backward
from pentad.schedules.spec.model import Experts


class Routing(NamedTuple):
    """Where tokens go, which B needs again. Only `counted` tokens have balancing losses (None: all)."""

    scores: Tensor  # [T, E], softmax or sigmoid of the logits
    experts: Tensor  # [T, K] int64, best first
    weights: Tensor  # [T, K]
    load: Tensor  # [E] int64, counted tokens that visit each expert
    logits: Tensor | None = None  # [T, E], for a z-loss
    counted: Tensor | None = None  # [T] bool


def route(
    x: Tensor,
    router: Tensor,
    bias: Tensor | None,
    shape: Experts,
    router_bias: Tensor | None = None,
    counted: Tensor | None = None,
) -> Routing:
    """Routes tokens x [T, H] by `router` [E, H].

    `bias` [E] is added to the scores for choosing experts, but not for their weights (arXiv 2408.15664); `router_bias`
    [E] is added to the logits.
    """
    logits = router_logits(x, router)
    if router_bias is not None:
        logits = logits + router_bias
    scores, experts, weights, load = choose_experts(logits, bias, gate_of(shape))
    if counted is not None:  # padding visits experts, too
        padding = (~counted).to(load.dtype).repeat_interleave(shape.top_k)
        load = load.index_add(0, experts.flatten(), padding, alpha=-1)
    return Routing(scores, experts, weights, load, logits if shape.router_z_loss_coef else None, counted)


def gate_of(shape: Experts) -> Gate:
    return Gate(
        shape.top_k,
        shape.scoring_func,
        shape.norm_topk_prob,
        shape.routed_scaling_factor,
        shape.num_groups,
        shape.topk_groups,
    )


def router_logits(x: Tensor, router: Tensor) -> Tensor:
    """[T, E], never rounded to 16 bits."""
    wide = accumulation_dtype(x.dtype)
    if x.is_cuda and x.dtype != wide:
        return torch.mm(x, router.t(), out_dtype=wide)
    return torch.mm(x.to(wide), router.to(wide).t())


def backward(
    routing: Routing, router: Tensor, shape: Experts, dweights: Tensor, dshares: Tensor | None, z_scale: float = 0.0
) -> tuple[Tensor, Tensor]:
    """(dlogits [T, E], the router's part of dx [T, H]), both in the router's dtype.

    `dweights` [T, K] is the gradient of the weights; `dshares` [E], from `aux_loss_grad`, that of each token's
    normalized scores; `z_scale` that of each token's squared log-sum-exp. Linear in all three, so partial sums of them
    give partial sums of the results.
    """
    scores, experts, weights, _, logits, counted = routing
    gate = gate_of(shape)
    dlogits = router_backward(scores, experts, weights, dweights, dshares, logits, z_scale, gate, router.dtype)
    if counted is not None and (dshares is not None or z_scale):
        dlogits.masked_fill_(~counted[:, None], 0.0)  # padding has no other loss
    return dlogits, torch.mm(dlogits, router)


def aux_loss_grad(routing: Routing, shape: Experts, scale: float, load: Tensor | None = None) -> Tensor:
    """[E]: the gradient of (tokens x scale) times the load-balancing loss with respect to a token's normalized scores.

    It is the same for every token. The loss of a microbatch is aux_loss_coef E sum_e (share of visits of expert e)
    (mean normalized score of e), which is aux_loss_coef for an even load (Switch Transformers, arXiv 2101.03961,
    section 2.2). With a scale of 1 / tokens of a step, a step's loss is the mean over its microbatches. `load` [E]
    counts the visits of the full microbatch if these tokens are only a part of it. Counts have no gradient. Without
    tokens there is no loss.
    """
    counts = (routing.load if load is None else load).to(routing.scores.dtype)
    visits = counts / counts.sum().clamp(min=1)
    return visits * (shape.aux_loss_coef * shape.num_experts * scale)
