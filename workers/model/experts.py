"""The feed-forward half of an expert layer, with its backward written out and its communication apart from the rest.

T tokens of this rank, H hidden, E experts of which `held` are here, I width of an expert here, K experts a token; T'
tokens that came from all ranks of the expert-parallel group and R rows, one for each expert here of each of these.

F is route, dispatch, compute, combine; B is its mirror image. Where experts and the shared network are cut over tp,
what `forward` and `backward` return are parts of sums over tp, and so is the router's gradient; `scale` is then to be
1 / tp of what it would be.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from pentad.kernels.moe.grouped_gemm import grouped_gemm
from pentad.kernels.moe.moe_permute import Rows, arrange, gate_rows, gate_rows_backward, gather_rows, sum_rows
from pentad.kernels.swiglu import swiglu, swiglu_backward
from pentad.schedules.spec.model import Experts
from pentad.workers.model import router
from pentad.workers.model.router import Routed
from pentad.workers.model.weight_grad import Deferred, Grouped, Product
from pentad.workers.parallel.async_ops import AsyncResult, Turns, gather2, ready
from pentad.workers.parallel.expert_parallel import ExpertParallelGroup, Route, Stay, open_route, pack, unpack


class Weights(NamedTuple):
    """Compute weights, or their main gradients. Matrices are [out, in]; `shared_...` may be None."""

    router: torch.Tensor  # [E, H]
    gate_up: torch.Tensor  # [held, 2I, H]
    down: torch.Tensor  # [held, H, I]
    shared_gate_up: torch.Tensor | None  # [2Is, H]
    shared_down: torch.Tensor | None  # [H, Is]


class Kept(NamedTuple):
    """What B needs of F and what is dear to make or comes from other ranks."""

    routed: Routed
    route: Route
    rows: Rows
    tokens: torch.Tensor | None  # [T', H] that came, None where they are this rank's own


class Remade(NamedTuple):
    """What else B needs, which `remade` makes again without communication."""

    gate_up: torch.Tensor  # [R, 2I]
    shared: torch.Tensor | None  # [T, 2Is]


class Given(NamedTuple):
    """What B gives to each of the T' tokens."""

    tokens: torch.Tensor  # [T', H]
    weights: torch.Tensor  # [T', K]


def forward(
    w: Weights, shape: Experts, normed: torch.Tensor, bias: torch.Tensor | None, site: ExpertParallelGroup
) -> Turns[tuple[torch.Tensor, Kept, Remade]]:
    """What the experts and the shared network make of tokens `normed` [T, H], and what B needs. `kept.routed.load`
    counts the visits of these tokens."""
    routed = router.route(normed, w.router, bias, shape)
    route = yield from open_route(routed.experts, w.gate_up.shape[0], site.group, site.way)
    coming = dispatch(w, normed, routed, route, site)
    shared, wide = compute_shared(w, normed)
    kept = yield from coming
    partial, gate_up = compute(w, normed, kept)
    mixed = yield from route.home(partial)
    return mixed if shared is None else mixed + shared, kept, Remade(gate_up, wide)


def dispatch(
    w: Weights, normed: torch.Tensor, routed: Routed, route: Route, site: ExpertParallelGroup
) -> AsyncResult[Kept]:
    """F's communication on the way out: tokens, choices and weights to the ranks of the experts."""
    held = w.gate_up.shape[0]
    if isinstance(route, Stay):
        return ready(Kept(routed, route, arrange(routed.experts, routed.weights, 0, held), None))
    packed, tokens = route.out(pack(routed.experts, routed.weights)), route.out(normed)

    def kept() -> Kept:
        rows = arrange(*unpack(packed.made()), site.number * held, held)
        return Kept(routed, route, rows, tokens.made())

    return AsyncResult((*packed.works, *tokens.works), kept, packed, tokens)


def compute(w: Weights, normed: torch.Tensor, kept: Kept) -> tuple[torch.Tensor, torch.Tensor]:
    """The experts here: (their part of the result of each of the T' tokens [T', H], gate_up [R, 2I])."""
    gate_up = _gate_up(w, normed, kept)
    # An expert's weight counts before its last product: what is kept for B is narrower there.
    out = grouped_gemm(gate_rows(gate_up, kept.rows), w.down, kept.rows.offsets)
    return sum_rows(out, kept.rows.positions), gate_up


def compute_shared(w: Weights, normed: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The network that every token visits: (its result [T, H], gate_up [T, 2Is]), nothing where there is none."""
    wide = _shared(w, normed)
    return (None, None) if wide is None or w.shared_down is None else (torch.mm(swiglu(wide), w.shared_down.t()), wide)


def remade(w: Weights, normed: torch.Tensor, kept: Kept) -> Remade:
    """RECOMPUTE of what F did not keep, by the kernels that made it."""
    return Remade(_gate_up(w, normed, kept), _shared(w, normed))


def backward(
    w: Weights,
    g: Weights,
    shape: Experts,
    normed: torch.Tensor,
    kept: Kept,
    remade: Remade,
    dmixed: torch.Tensor,
    *,
    scale: float = 0.0,
    load: torch.Tensor | None = None,
) -> Turns[tuple[torch.Tensor, list[Deferred]]]:
    """B: the gradient of `normed` from that of the result, both [T, H], and what W has to do.

    `scale` is the balance loss's factor for each token: 1 / (tokens of a step); `load` [E] as in `router.balance_loss`.
    """
    dout = yield from kept.route.out(dmixed)
    given, work = compute_backward(w, g, normed, kept, remade.gate_up, dout)
    coming = gather2(kept.route.home(given.tokens), kept.route.home(given.weights))
    dwide, shared = compute_shared_backward(w, g, normed, remade.shared, dmixed)
    came = yield from coming
    pull = router.aux_loss_grad(kept.routed, shape, scale, load) if shape.aux_loss_coef and scale else None
    dlogits, dnormed = router.backward(kept.routed, w.router, shape, came[1], pull)
    dnormed += came[0]
    if dwide is not None and w.shared_gate_up is not None:
        dnormed.addmm_(dwide, w.shared_gate_up)
    return dnormed, [*work, Product(g.router, dlogits, normed), *shared]


def compute_backward(
    w: Weights, g: Weights, normed: torch.Tensor, kept: Kept, gate_up: torch.Tensor, dout: torch.Tensor
) -> tuple[Given, list[Deferred]]:
    """The experts here, from the gradient of the results of all T' tokens [T', H], `kept.route.out(dmixed)`."""
    rows, tokens = kept.rows, normed if kept.tokens is None else kept.tokens
    dgated = grouped_gemm(gather_rows(dout, rows.tokens, rows.offsets), w.down.transpose(1, 2), rows.offsets)
    dgate_up, gated, dweight = gate_rows_backward(dgated, gate_up, rows)
    drows = grouped_gemm(dgate_up, w.gate_up.transpose(1, 2), rows.offsets)
    dweights = torch.where(rows.positions >= 0, dweight[rows.positions.clamp(min=0)], 0)
    work: list[Deferred] = [
        Grouped(g.down, dout, gated, rows.offsets, rows.tokens, None),
        Grouped(g.gate_up, dgate_up, tokens, rows.offsets, None, rows.tokens),
    ]
    return Given(sum_rows(drows, rows.positions), dweights), work


def compute_shared_backward(
    w: Weights, g: Weights, normed: torch.Tensor, wide: torch.Tensor | None, dmixed: torch.Tensor
) -> tuple[torch.Tensor | None, list[Deferred]]:
    """The gradient [T, 2Is] of the shared network's gate_up `wide`, nothing where there is none."""
    if wide is None or w.shared_down is None:
        return None, []
    assert g.shared_gate_up is not None and g.shared_down is not None
    dwide, gated = swiglu_backward(torch.mm(dmixed, w.shared_down), wide)
    return dwide, [Product(g.shared_down, dmixed, gated), Product(g.shared_gate_up, dwide, normed)]


def _gate_up(w: Weights, normed: torch.Tensor, kept: Kept) -> torch.Tensor:
    tokens, rows = normed if kept.tokens is None else kept.tokens, kept.rows
    return grouped_gemm(gather_rows(tokens, rows.tokens, rows.offsets), w.gate_up, rows.offsets)


def _shared(w: Weights, normed: torch.Tensor) -> torch.Tensor | None:
    return None if w.shared_gate_up is None else torch.mm(normed, w.shared_gate_up.t())
