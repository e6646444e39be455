"""A decoder layer with its backward written out: F, B and W are three calls, no autograd between them.

Two halves, attention and feed-forward, each behind a norm and added to the residual stream. T tokens of this rank's
part of the stream, H hidden.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from pentad.kernels.rms_norm import rms_norm, rms_norm_backward
from pentad.schedules.spec.model import ModelShape
from pentad.workers.model import attention, mla, mlp, moe
from pentad.workers.model.layer_context import Around, Half, Place, Views
from pentad.workers.model.weight_grad import Deferred, Sum
from pentad.workers.parallel.async_ops import Turns


class Weights(NamedTuple):
    """A layer's tensors: compute weights, or their main gradients."""

    attention_norm: torch.Tensor  # [H]
    attention: Any
    mlp_norm: torch.Tensor  # [H]
    mlp: Any


class Roots(NamedTuple):
    """What B needs of F and what is dear to make: products, attention, and the streams they stand between."""

    stream: torch.Tensor  # [T, H] residual stream at the layer's entry
    scale: torch.Tensor  # [T]
    attention: Any
    middle: torch.Tensor  # [T, H] residual stream between the two halves
    middle_scale: torch.Tensor  # [T]
    mlp: Any


class Leaves(NamedTuple):
    """What else B needs, which `leaves` makes of the roots: two norms, and the halves' own."""

    normed: torch.Tensor  # [T, H]
    attention: Any
    middle_normed: torch.Tensor  # [T, H]
    mlp: Any


class Halves(NamedTuple):
    attention: Half
    mlp: Half


def halves_of(model: ModelShape, layer: int) -> Halves:
    """What a layer is made of."""
    has_experts = model.experts is not None and layer >= model.experts.first_k_dense
    return Halves(attention if model.mla is None else mla, moe if has_experts else mlp)


def weights_of(views: Views, layer: int, halves: Halves) -> Weights:
    at = f"layers.{layer}"
    first, second = (half.weights_of(views, at) for half in halves)
    return Weights(views[f"{at}.attention_norm"], first, views[f"{at}.mlp_norm"], second)


def forward(
    w: Weights, halves: Halves, around: Around, place: Place, branch: torch.Tensor, stream: torch.Tensor | None
) -> Turns[tuple[torch.Tensor, torch.Tensor, Roots, Leaves]]:
    """The residual stream is `branch` plus `stream` [T, H]: the sum is taken inside the norm.

    Returns the new (branch, stream) and what B needs.
    """
    eps = around.model.norm_eps
    normed, entry, scale = rms_norm(branch, w.attention_norm, eps, stream)
    mixed, *first = yield from halves.attention.forward(w.attention, around, place, normed)
    middle_normed, middle, middle_scale = rms_norm(mixed, w.mlp_norm, eps, entry)
    branch, *second = yield from halves.mlp.forward(w.mlp, around, place, middle_normed)
    roots = Roots(entry, scale, first[0], middle, middle_scale, second[0])
    return branch, middle, roots, Leaves(normed, first[1], middle_normed, second[1])


def leaves(w: Weights, halves: Halves, around: Around, roots: Roots) -> Leaves:
    """RECOMPUTE of what F did not keep, by the kernels that made it."""
    eps = around.model.norm_eps
    normed, _, _ = rms_norm(roots.stream, w.attention_norm, eps)
    first = halves.attention.leaves(w.attention, around, normed, roots.attention)
    middle_normed, _, _ = rms_norm(roots.middle, w.mlp_norm, eps)
    second = halves.mlp.leaves(w.mlp, around, middle_normed, roots.mlp)
    return Leaves(normed, first, middle_normed, second)


def backward(
    w: Weights,
    g: Weights,
    halves: Halves,
    around: Around,
    place: Place,
    roots: Roots,
    leaves: Leaves,
    dy: torch.Tensor,
) -> Turns[tuple[torch.Tensor, list[Deferred]]]:
    """B: the gradient of the residual stream at the entry from that at the exit, both [T, H]; and what W has to do.

    `w` are compute weights, `g` their main gradients.
    """
    saved = roots.mlp, leaves.mlp
    dnormed, work = yield from halves.mlp.backward(w.mlp, g.mlp, around, place, leaves.middle_normed, *saved, dy)
    dmiddle, dnorm = rms_norm_backward(dnormed, roots.middle, w.mlp_norm, roots.middle_scale, dy)
    work = [*work, Sum(g.mlp_norm, dnorm)]
    saved = roots.attention, leaves.attention
    dnormed, more = yield from halves.attention.backward(
        w.attention, g.attention, around, place, leaves.normed, *saved, dmiddle
    )
    dentry, dnorm = rms_norm_backward(dnormed, roots.stream, w.attention_norm, roots.scale, dmiddle)
    return dentry, [*work, *more, Sum(g.attention_norm, dnorm)]
