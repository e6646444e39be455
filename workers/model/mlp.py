"""The gated feed-forward half of a layer: down(silu(gate x) * up x), its width cut over the tensor ranks."""

from __future__ import annotations

from typing import NamedTuple

import torch

from pentad.kernels.swiglu import swiglu, swiglu_backward
from pentad.workers.model.layer_context import Around, Place, Views
from pentad.workers.model.weight_grad import Deferred, Product
from pentad.workers.parallel.async_ops import Turns, gather2


class Weights(NamedTuple):
    """I is this rank's part of the width."""

    gate_up: torch.Tensor  # [2I, H]
    down: torch.Tensor  # [H, I]


def weights_of(views: Views, at: str) -> Weights:
    return Weights(views[f"{at}.mlp.gate_up"], views[f"{at}.mlp.down"])


def forward(
    w: Weights, around: Around, place: Place, x: torch.Tensor
) -> Turns[tuple[torch.Tensor, None, torch.Tensor]]:
    whole = yield from around.tensor.gather(x)
    gate_up = torch.mm(whole, w.gate_up.t())
    out = yield from around.tensor.product(swiglu(gate_up), w.down.t())
    return out, None, gate_up


def leaves(w: Weights, around: Around, x: torch.Tensor, roots: None) -> torch.Tensor:
    """[T, 2I]: the widest product."""
    return torch.mm(around.tensor.gather(x).now(), w.gate_up.t())


def backward(
    w: Weights,
    g: Weights,
    around: Around,
    place: Place,
    x: torch.Tensor,
    roots: None,
    leaves: torch.Tensor,
    dy: torch.Tensor,
) -> Turns[tuple[torch.Tensor, list[Deferred]]]:
    dy = yield from around.tensor.gather(dy)
    dgate_up, gated = swiglu_backward(torch.mm(dy, w.down), leaves)
    whole, dx = yield from gather2(around.tensor.gather(x), around.tensor.product(dgate_up, w.gate_up))
    return dx, [Product(g.down, dy, gated), Product(g.gate_up, dgate_up, whole)]
