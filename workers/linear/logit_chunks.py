"""The output head and its loss without the logits of all rows: chunk by chunk, each in the memory of the one before.

Only the log-sum-exps of the logits are saved: W recomputes each chunk. T tokens, V words in this rank's part of the
vocabulary, H hidden.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pentad.kernels.cross_entropy import cross_entropy_backward_
from pentad.kernels.wgrad_gemm import accumulate_gradient_


class TokenLoss(NamedTuple):
    """The loss of a token including its `z_loss`, times `scale`; `softcap` as in `cross_entropy`."""

    scale: float
    softcap: float = 0.0
    z_loss: float = 0.0


class HeadWgrad(NamedTuple):
    """gradient [V, H] += dlogits^T @ normed [T, H]; the logits are recomputed from `weight` [V, H], `rows` at a
    time."""

    gradient: Tensor | None
    weight: Tensor
    normed: Tensor
    targets: Tensor  # [T]
    lse: Tensor  # [T]
    loss: TokenLoss
    rows: int

    def accumulate(self, gradient: Tensor, *, overwrite: bool) -> None:
        """Adds to the gradient or, with `overwrite`, replaces it."""
        tokens = len(self.normed)
        made = self.normed.new_empty(min(self.rows, tokens), len(self.weight))  # each chunk overwrites the one before
        for start in range(0, tokens, self.rows):
            at = slice(start, min(start + self.rows, tokens))
            logits = torch.mm(self.normed[at], self.weight.t(), out=made[: at.stop - start])
            cross_entropy_backward_(logits, self.targets[at], self.lse[at], *self.loss)
            accumulate_gradient_(gradient, logits, self.normed[at], overwrite=overwrite and start == 0)
