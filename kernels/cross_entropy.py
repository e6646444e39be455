"""Cross entropy of a token's logits, forward and backward, without a copy of the logits in a wider dtype."""

import torch
from torch import Tensor

from pentad.kernels.backend import IGNORE_INDEX, accumulation_dtype, runs_in_triton


def _onehot_at(targets: Tensor, vocabulary: int) -> tuple[Tensor, Tensor]:
    """(targets clamped into the vocabulary, whether the target was inside it)."""
    return targets.clamp(0, vocabulary - 1), (targets >= 0) & (targets < vocabulary)


def cross_entropy_reference(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The formula of `cross_entropy` in torch operations, for any dtype and device."""
    wide = logits.to(accumulation_dtype(logits.dtype))
    lse = torch.logsumexp(wide, dim=-1)
    column, inside = _onehot_at(targets, logits.shape[1])
    chosen = wide.gather(1, column[:, None])[:, 0]
    loss = lse - torch.where(inside, chosen, 0.0)
    return torch.where(targets == IGNORE_INDEX, 0.0, loss), lse


def cross_entropy_backward_reference_(logits: Tensor, targets: Tensor, lse: Tensor, scale: float) -> None:
    """The formula of `cross_entropy_backward_` in torch operations, for any dtype and device."""
    grad = torch.exp(logits.to(lse.dtype) - lse[:, None])
    column, inside = _onehot_at(targets, logits.shape[1])
    grad.scatter_add_(1, column[:, None], -inside.to(grad.dtype)[:, None])
    grad.mul_(scale).masked_fill_((targets == IGNORE_INDEX)[:, None], 0.0)
    logits.copy_(grad)


def cross_entropy(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """(loss [T], lse [T]) of logits [T, V] and targets [T] int64, in float32 (float64 for float64 logits).

    The loss of a token is lse - logits[target], and 0 where the target is -100. A target outside [0, V) other than -100
    lies on another shard of the vocabulary: its loss is lse alone. lse is the logarithm of the sum of exponentials of
    the row, whatever the target.
    """
    if runs_in_triton(logits):
        from pentad.kernels import cross_entropy_triton

        return cross_entropy_triton.cross_entropy(logits, targets)
    return cross_entropy_reference(logits, targets)


def cross_entropy_backward_(logits: Tensor, targets: Tensor, lse: Tensor, scale: float) -> None:
    """Overwrites logits [T, V] with their gradient (softmax - onehot) * scale; rows whose target is -100 become 0.

    The onehot of a target outside [0, V) is 0, and `lse` may be that of a whole, sharded vocabulary.
    """
    if runs_in_triton(logits):
        from pentad.kernels import cross_entropy_triton

        cross_entropy_triton.cross_entropy_backward_(logits, targets, lse, scale)
    else:
        cross_entropy_backward_reference_(logits, targets, lse, scale)
