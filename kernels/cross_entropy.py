"""Cross-entropy, forward and backward, without a copy of the logits in a wider dtype."""

import torch
from torch import Tensor

from pentad.kernels.backend import IGNORE_INDEX, accumulation_dtype, triton_on_gpu


def _clamp_targets(targets: Tensor, vocabulary: int) -> tuple[Tensor, Tensor]:
    """(targets clamped to the vocabulary, which of them are in it)."""
    return targets.clamp(0, vocabulary - 1), (targets >= 0) & (targets < vocabulary)


def _capped(logits: Tensor, softcap: float) -> Tensor:
    return softcap * (logits / softcap).tanh() if softcap else logits


@triton_on_gpu
def cross_entropy(logits: Tensor, targets: Tensor, softcap: float = 0.0) -> tuple[Tensor, Tensor]:
    """(loss [T], lse [T]) of logits [T, V] and targets [T] int64, in float32 (float64 for float64 logits). With
    `softcap` c > 0 a logit x counts as c tanh(x / c).

    The loss of a token is lse - logits[target], with lse the log-sum-exp of the row, and 0 for a target of -100. Any
    other target outside [0, V) belongs to another shard of the vocabulary: the loss is then lse.
    """
    wide = _capped(logits.to(accumulation_dtype(logits.dtype)), softcap)
    lse = torch.logsumexp(wide, dim=-1)
    column, inside = _clamp_targets(targets, logits.shape[1])
    chosen = wide.gather(1, column[:, None])[:, 0]
    loss = lse - torch.where(inside, chosen, 0.0)
    return torch.where(targets == IGNORE_INDEX, 0.0, loss), lse


@triton_on_gpu
def cross_entropy_backward_(
    logits: Tensor, targets: Tensor, lse: Tensor, scale: float, softcap: float = 0.0, z_loss: float = 0.0
) -> None:
    """Overwrites logits [T, V] with the gradient of scale * (loss + z_loss * lse^2), which is
    (softmax * (1 + 2 * z_loss * lse) - onehot) * scale; rows with a target of -100 become 0.

    The one-hot vector of a target outside [0, V) is 0. `lse` may be that of the full, sharded vocabulary. The squares
    keep the normalizer of the softmax near 1 (PaLM, arXiv 2204.02311, section 5).
    """
    capped = _capped(logits.to(lse.dtype), softcap)
    grad = torch.exp(capped - lse[:, None]) * (1 + 2 * z_loss * lse[:, None])
    column, inside = _clamp_targets(targets, logits.shape[1])
    grad.scatter_add_(1, column[:, None], -inside.to(grad.dtype)[:, None])
    if softcap:
        grad *= 1.0 - (capped / softcap).square()
    grad.mul_(scale).masked_fill_((targets == IGNORE_INDEX)[:, None], 0.0)
    logits.copy_(grad)
