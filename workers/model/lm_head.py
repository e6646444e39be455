"""The two ends of a model, their vocabulary cut over the tensor ranks: embedding, and output head with its loss.

Logits are never gathered: ranks exchange two numbers a token (arXiv 1909.08053, section 3).
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from pentad.kernels.cross_entropy import cross_entropy, cross_entropy_backward_
from pentad.workers.model.weight_grad import Deferred, Lookup, Product
from pentad.workers.parallel.async_ops import gather2
from pentad.workers.parallel.tensor_parallel import TensorRanks


class Scores(NamedTuple):
    """What B needs of the head and the loss."""

    normed: torch.Tensor  # [T / tp, H]
    logits: torch.Tensor  # [T, V / tp]
    lse: torch.Tensor  # [T]
    targets: torch.Tensor  # [T], counted from this rank's first word


def embed(weight: torch.Tensor, tokens: torch.Tensor, ranks: TensorRanks) -> torch.Tensor:
    """Rows [T / tp, H] of the tokens [T]; `weight` [V / tp, H] are this rank's words."""
    if ranks.size == 1:
        return weight[tokens]
    own, foreign = _own(weight, tokens, ranks)
    return ranks.scatter(weight[own].masked_fill_(foreign[:, None], 0.0)).now()


def embed_backward(
    gradient: torch.Tensor, dy: torch.Tensor, tokens: torch.Tensor, ranks: TensorRanks
) -> list[Deferred]:
    """What W adds for the rows' gradient dy [T / tp, H]."""
    dy = ranks.gather(dy).now()
    if ranks.size > 1:
        tokens, foreign = _own(gradient, tokens, ranks)
        dy = dy.masked_fill(foreign[:, None], 0.0)
    return [Lookup(gradient, dy, tokens)]


def score(
    weight: torch.Tensor, normed: torch.Tensor, targets: torch.Tensor, ranks: TensorRanks
) -> tuple[Scores, torch.Tensor]:
    """(what B needs, losses [T]); `weight` [V / tp, H] are this rank's words. Every rank has the same losses."""
    logits = torch.mm(ranks.gather(normed).now(), weight.t())
    if ranks.size > 1:
        # -1 is no rank's word, and -100 no token's loss
        first = ranks.number * weight.shape[0]
        targets = torch.where(targets < 0, targets, (targets - first).masked_fill(targets < first, -1))
    losses, lse = cross_entropy(logits, targets)
    if ranks.size > 1:
        losses, lse = _whole(losses, lse, targets, ranks)
    return Scores(normed, logits, lse, targets), losses


def score_backward(
    weight: torch.Tensor, gradient: torch.Tensor, scores: Scores, scale: float, ranks: TensorRanks
) -> tuple[torch.Tensor, list[Deferred]]:
    """The gradient [T / tp, H] of the normed stream, and what W adds; every token's loss counts `scale`. The logits
    become their gradient."""
    dlogits = scores.logits
    cross_entropy_backward_(dlogits, scores.targets, scores.lse, scale)
    dnormed, normed = gather2(ranks.product(dlogits, weight), ranks.gather(scores.normed)).now()
    return dnormed, [Product(gradient, dlogits, normed)]


def _own(weight: torch.Tensor, tokens: torch.Tensor, ranks: TensorRanks) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens as rows of this rank's words, which of them are not its own)."""
    rows = tokens - ranks.number * weight.shape[0]
    foreign = (rows < 0) | (rows >= weight.shape[0])
    return rows.masked_fill(foreign, 0), foreign


def _whole(
    losses: torch.Tensor, lse: torch.Tensor, targets: torch.Tensor, ranks: TensorRanks
) -> tuple[torch.Tensor, torch.Tensor]:
    """Losses and sums over the whole vocabulary from each rank's over its own words."""
    chosen = torch.where(targets == -100, 0.0, lse - losses)  # the target's logit, where it is this rank's
    sums = ranks.sums(torch.stack((lse, chosen))).now()  # [tp, 2, T]
    whole = torch.logsumexp(sums[:, 0], 0)
    return torch.where(targets == -100, 0.0, whole - sums[:, 1].sum(0)), whole
