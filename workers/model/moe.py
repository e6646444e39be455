"""The feed-forward half of a layer with experts, whose widths are cut over the tensor ranks.

Tensor ranks gather all tokens, route them alike and compute parts of every result; see experts.py.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist

from pentad.schedules.spec.model import Experts
from pentad.workers.model import experts
from pentad.workers.model.layer_context import Around, Place, Views
from pentad.workers.model.weight_grad import Deferred
from pentad.workers.parallel.async_ops import AsyncResult, Turns, gather2, ready


class Weights(NamedTuple):
    """`bias` [E] counts for the choice of experts; `load` [E] is where a step's visits are counted. Gradients have
    neither."""

    experts: experts.Weights
    bias: torch.Tensor | None
    load: torch.Tensor | None


class Roots(NamedTuple):
    kept: experts.Kept
    load: torch.Tensor | None  # [E] of the whole microbatch, where a loss balances it


def weights_of(views: Views, at: str) -> Weights:
    names = ("experts.router", "experts.gate_up", "experts.down", "shared.gate_up", "shared.down")
    router, gate_up, down, *shared = (views.get(f"{at}.{name}") for name in names)
    assert router is not None
    assert gate_up is not None
    assert down is not None
    own = experts.Weights(router, gate_up, down, *shared)
    return Weights(own, views.get(f"{at}.experts.bias"), views.get(f"{at}.experts.load"))


def forward(
    w: Weights, around: Around, place: Place, x: torch.Tensor
) -> Turns[tuple[torch.Tensor, Roots, experts.Remade]]:
    whole = yield from around.tensor.gather(x)
    partial, kept, remade = yield from experts.forward(w.experts, _shape(around), whole, w.bias, around.experts)
    if around.counted and w.load is not None:
        w.load.add_(kept.routed.load)
    mixed, load = yield from gather2(around.tensor.scatter(partial), _load(around, kept))
    return mixed, Roots(kept, load), remade


def leaves(w: Weights, around: Around, x: torch.Tensor, roots: Roots) -> experts.Remade:
    return experts.remade(w.experts, around.tensor.gather(x).now(), roots.kept)


def backward(
    w: Weights,
    g: Weights,
    around: Around,
    place: Place,
    x: torch.Tensor,
    roots: Roots,
    leaves: experts.Remade,
    dy: torch.Tensor,
) -> Turns[tuple[torch.Tensor, list[Deferred]]]:
    whole, dmixed = yield from gather2(around.tensor.gather(x), around.tensor.gather(dy))
    saved, scale = (roots.kept, leaves), around.loss_scale / around.tensor.size
    dnormed, work = yield from experts.backward(
        w.experts, g.experts, _shape(around), whole, *saved, dmixed, scale=scale, load=roots.load
    )
    dx = yield from around.tensor.scatter(dnormed)
    return dx, work


def _load(around: Around, kept: experts.Kept) -> AsyncResult[torch.Tensor | None]:
    """Visits of a microbatch's tokens, of which context ranks have parts."""
    if not _shape(around).aux_loss_coef or around.context.size == 1:
        return ready(None)
    load = kept.routed.load.clone()
    return AsyncResult((dist.all_reduce(load, group=around.context.group, async_op=True),), lambda: load)


def _shape(around: Around) -> Experts:
    assert around.model.experts is not None
    return around.model.experts
