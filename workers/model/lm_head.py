"""The two ends of a model, their vocabulary split over the tp ranks: the embedding, and the output head with its loss.

Logits are never gathered: the ranks exchange two numbers a token (Megatron-LM, arXiv 1909.08053, section 3). In chunks
of rows they are not kept either: F computes the gradient of the head's input at once, and W recomputes the logits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pentad.kernels.cross_entropy import cross_entropy, cross_entropy_backward_
from pentad.workers.linear.linear import Axes, Linear
from pentad.workers.linear.logit_chunks import HeadWgrad, TokenLoss
from pentad.workers.linear.weight_grad import EmbeddingWgrad, LinearWgrad, Param
from pentad.workers.parallel.async_ops import AsyncResult, gather2
from pentad.workers.parallel.tensor_parallel import TensorParallelGroup


class LossSaved(NamedTuple):
    """What B needs of the head and the loss: the logits or, with chunks, the gradient of `normed`."""

    normed: Tensor  # [T / tp, H]
    lse: Tensor  # [T]
    targets: Tensor  # [T], relative to this rank's first vocabulary entry
    logits: Tensor | None = None  # [T, V / tp]
    dnormed: Tensor | None = None  # [T / tp, H]


def embed(param: Param, tokens: Tensor, tp: TensorParallelGroup) -> Tensor:
    """The embeddings [T / tp, H] of tokens [T]; `param` [V / tp, H] is this rank's part of the vocabulary."""
    weight = param.weight
    if tp.size == 1:
        return weight[tokens]
    rows, is_remote = _local_rows(weight, tokens, tp)
    return tp.reduce_scatter(weight[rows].masked_fill_(is_remote[:, None], 0.0)).wait()


def embed_backward(param: Param, dy: Tensor, tokens: Tensor, tp: TensorParallelGroup) -> EmbeddingWgrad:
    """The work for W, from the gradient dy [T / tp, H] of the embeddings."""
    dy = tp.all_gather(dy).wait()
    if tp.size > 1:
        rows, is_remote = _local_rows(param.weight, tokens, tp)
        tokens = rows.masked_fill_(is_remote, -1)
    return EmbeddingWgrad(param.gradient, dy, tokens)


def head_loss(
    head: Linear,
    normed: Tensor,
    targets: Tensor,
    axes: Axes,
    loss: TokenLoss,
    rows: int = 0,
    *,
    has_backward: bool = True,
) -> tuple[LossSaved, Tensor]:
    """(what B needs, losses [T], the same on every rank); `head` [V / tp, H] is this rank's part of the vocabulary.

    Logits are kept, or processed in chunks of `rows`, which prepare a backward only if `has_backward`. A target of -100
    has no loss.
    """
    tp = axes.tp
    if tp.size > 1:
        first = tp.rank * head.weight.shape[0]
        # -1 is outside every rank's vocabulary; -100 stays as it is.
        targets = torch.where(targets < 0, targets, (targets - first).masked_fill(targets < first, -1))
    if not rows:
        logits = head.forward_gathered(axes, normed).wait()
        losses, lse = _losses(logits, targets, tp, loss.softcap)
        return LossSaved(normed, lse, targets, logits), losses
    return _loss_of_chunks(head, normed, targets, axes, loss, rows, has_backward=has_backward)


def _loss_of_chunks(
    head: Linear, normed: Tensor, targets: Tensor, axes: Axes, loss: TokenLoss, rows: int, *, has_backward: bool
) -> tuple[LossSaved, Tensor]:
    """A chunk has equally many rows of each rank. A rank's own are multiplied while the others arrive, and a chunk's
    part of the gradient is reduced while the next chunk is computed."""
    assert head.casts is None, "logits of a head in 8 bits are kept"
    size, by_rank = max(1, rows // axes.tp.size), targets.view(axes.tp.size, -1)
    parts, in_flight = list[tuple[Tensor, Tensor]](), list[tuple[Tensor, AsyncResult[Tensor]]]()
    dnormed = torch.empty_like(normed) if has_backward else None

    def take() -> None:
        while in_flight:
            target, gradient = in_flight.pop()
            target.copy_(gradient.wait())

    for start in range(0, len(normed), size):
        at = slice(start, start + size)
        logits, of_chunk = head.forward_gathered(axes, normed[at]).wait(), by_rank[:, at].contiguous().flatten()
        parts.append(_losses(logits, of_chunk, axes.tp, loss.softcap))
        take()
        if dnormed is not None:
            cross_entropy_backward_(logits, of_chunk, parts[-1][1], *loss)
            in_flight.append((dnormed[at], head.input_grad_scattered(axes, logits)))
        del logits  # free them for the next chunk
    take()
    losses, lse = (torch.cat([part.view(len(by_rank), -1) for part in each], 1) for each in zip(*parts, strict=True))
    return LossSaved(normed, lse.flatten(), targets, dnormed=dnormed), losses.flatten()


def squared_lse(saved: LossSaved) -> Tensor:
    """[T]: the squares whose mean is the z-loss; 0 for a target of -100."""
    return torch.where(saved.targets == -100, 0.0, saved.lse.square())


def head_loss_backward(
    head: Linear, saved: LossSaved, axes: Axes, loss: TokenLoss, rows: int = 0
) -> tuple[Tensor, LinearWgrad | HeadWgrad]:
    """(gradient [T / tp, H] of the normed stream, work for W). Kept logits are overwritten by their gradient."""
    if saved.logits is None:
        assert saved.dnormed is not None
        normed = axes.tp.all_gather(saved.normed).wait()
        return saved.dnormed, HeadWgrad(head.gradient, head.weight, normed, saved.targets, saved.lse, loss, rows)
    cross_entropy_backward_(saved.logits, saved.targets, saved.lse, *loss)
    dlogits = head.output_grad(axes, saved.logits)
    gathered = axes.tp.all_gather(saved.normed)  # overlaps with the product
    normed, dnormed = gather2(gathered, head.input_grad_scattered(axes, dlogits)).wait()
    return dnormed, head.wgrad(dlogits, head.input(axes, normed, columns=True))


def _local_rows(weight: Tensor, tokens: Tensor, tp: TensorParallelGroup) -> tuple[Tensor, Tensor]:
    """(rows in this rank's part of the vocabulary, whether a token belongs to another rank), both [T]."""
    rows = tokens - tp.rank * weight.shape[0]
    is_remote = (rows < 0) | (rows >= weight.shape[0])
    return rows.masked_fill(is_remote, 0), is_remote


def _losses(logits: Tensor, targets: Tensor, tp: TensorParallelGroup, softcap: float) -> tuple[Tensor, Tensor]:
    """(losses [T], lse [T]) over the full vocabulary, from this rank's logits [T, V / tp]."""
    losses, lse = cross_entropy(logits, targets, softcap)
    return _reduce_losses(losses, lse, targets, tp) if tp.size > 1 else (losses, lse)


def _reduce_losses(losses: Tensor, lse: Tensor, targets: Tensor, tp: TensorParallelGroup) -> tuple[Tensor, Tensor]:
    """(losses, lse) over the full vocabulary from those over each rank's part."""
    target_logit = torch.where(targets == -100, 0.0, lse - losses)  # 0 on ranks that do not have the target
    parts = tp.all_gather_stacked(torch.stack((lse, target_logit))).wait()  # [tp, 2, T]
    full = torch.logsumexp(parts[:, 0], 0)
    return torch.where(targets == -100, 0.0, full - parts[:, 1].sum(0)), full
