"""The mixture-of-experts sublayer: route, dispatch, compute, combine, and the mirror image in the backward.

Experts are distributed over the ep ranks, and their intermediate sizes, like that of the shared expert, split over the
tp ranks: those gather all tokens, route them alike, compute partial results and reduce-scatter the sums.

T tokens of the tp group, H hidden, E experts, `local` of them on this rank, I the intermediate size here, K experts a
token. T' tokens received from the ranks of the ep group make R rows: one for each local expert of each token.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from pentad.kernels.moe.grouped_gemm import grouped_gemm
from pentad.kernels.moe.moe_permute import (
    ExpertRows,
    gather_rows,
    sort_by_expert,
    sum_rows,
    weighted_swiglu,
    weighted_swiglu_backward,
)
from pentad.kernels.swiglu import swiglu, swiglu_backward
from pentad.schedules.spec.model import Experts
from pentad.workers.model import router
from pentad.workers.model.layer_context import LayerContext, SequenceContext, Views
from pentad.workers.model.router import Routing
from pentad.workers.model.weight_grad import GroupedWgrad, LinearWgrad, Wgrad
from pentad.workers.parallel.async_ops import AsyncResult, Task, gather2, ready
from pentad.workers.parallel.expert_parallel import (
    Dispatcher,
    ExpertParallelGroup,
    LocalDispatcher,
    make_dispatcher,
    pack_routing,
    unpack_routing,
)


class MoEWeights(NamedTuple):
    """Compute weights, or their main gradients, which have neither bias nor load. Matrices are [out, in]."""

    router: Tensor  # [E, H]
    gate_up: Tensor  # [local, 2I, H]
    down: Tensor  # [local, H, I]
    shared_gate_up: Tensor | None  # [2Is, H]
    shared_down: Tensor | None  # [H, Is]
    bias: Tensor | None = None  # [E], added to the scores for the choice of experts
    load: Tensor | None = None  # [E] int64, counts the visits of a step


class MoESaved(NamedTuple):
    """Activations that are expensive to compute or came from other ranks."""

    routing: Routing
    dispatcher: Dispatcher
    rows: ExpertRows
    received: Tensor | None  # [T', H], None where tokens stay on this rank
    load: Tensor | None  # [E], visits of the whole microbatch, for the load-balancing loss


class MoERecomputable(NamedTuple):
    """Activations that need no communication to rebuild."""

    gate_up: Tensor  # [R, 2I]
    shared_gate_up: Tensor | None  # [T, 2Is]


def weights_of(views: Views, prefix: str) -> MoEWeights:
    names = ("shared.gate_up", "shared.down", "experts.bias", "experts.load")
    matrices = (views[f"{prefix}.experts.{name}"] for name in ("router", "gate_up", "down"))
    return MoEWeights(*matrices, *(views.get(f"{prefix}.{name}") for name in names))


def forward(
    w: MoEWeights, context: LayerContext, sequence: SequenceContext, x: Tensor
) -> Task[tuple[Tensor, MoESaved, MoERecomputable]]:
    x = yield from context.tp.all_gather(x)
    routing = router.route(x, w.router, w.bias, _shape(context))
    dispatcher = yield from make_dispatcher(routing.experts, w.gate_up.shape[0], context.ep.group, context.ep.mode)
    in_flight = _dispatch(w, x, routing, dispatcher, context.ep)
    shared_gate_up = _shared_gate_up(w, x)
    shared = None
    if shared_gate_up is not None and w.shared_down is not None:
        shared = torch.mm(swiglu(shared_gate_up), w.shared_down.t())
    saved = yield from in_flight
    partial, gate_up = _compute_experts(w, x, saved)
    out = yield from dispatcher.combine(partial)
    out = out if shared is None else out + shared
    if context.count_load and w.load is not None:
        w.load.add_(routing.load)
    y, load = yield from gather2(context.tp.reduce_scatter(out), _microbatch_load(context, routing))
    return y, saved._replace(load=load), MoERecomputable(gate_up, shared_gate_up)


def recompute(w: MoEWeights, context: LayerContext, x: Tensor, saved: MoESaved) -> MoERecomputable:
    """RECOMPUTE, by the kernels of the forward."""
    x = context.tp.all_gather(x).wait()
    return MoERecomputable(_gate_up(w, x, saved), _shared_gate_up(w, x))


def backward(
    w: MoEWeights,
    g: MoEWeights,
    context: LayerContext,
    sequence: SequenceContext,
    x: Tensor,
    saved: MoESaved,
    recomputable: MoERecomputable,
    dy: Tensor,
) -> Task[tuple[Tensor, list[Wgrad]]]:
    shape, scale = _shape(context), context.loss_scale / context.tp.size  # dx is summed over the tp ranks
    x, dy = yield from gather2(context.tp.all_gather(x), context.tp.all_gather(dy))
    dout = yield from saved.dispatcher.dispatch(dy)
    dtokens, dweights, work = _experts_backward(w, g, x, saved, recomputable.gate_up, dout)
    in_flight = gather2(saved.dispatcher.combine(dtokens), saved.dispatcher.combine(dweights))
    dshared_gate_up, shared_work = _shared_backward(w, g, x, recomputable.shared_gate_up, dy)
    dtokens, dweights = yield from in_flight
    dshares = router.aux_loss_grad(saved.routing, shape, scale, saved.load) if shape.aux_loss_coef and scale else None
    dlogits, dx = router.backward(saved.routing, w.router, shape, dweights, dshares)
    dx += dtokens
    if dshared_gate_up is not None and w.shared_gate_up is not None:
        dx.addmm_(dshared_gate_up, w.shared_gate_up)
    dx = yield from context.tp.reduce_scatter(dx)
    return dx, [*work, LinearWgrad(g.router, dlogits, x), *shared_work]


def _dispatch(
    w: MoEWeights, x: Tensor, routing: Routing, dispatcher: Dispatcher, ep: ExpertParallelGroup
) -> AsyncResult[MoESaved]:
    """Sends tokens, their experts and weights to the ranks of the experts."""
    local = w.gate_up.shape[0]
    if isinstance(dispatcher, LocalDispatcher):
        rows = sort_by_expert(routing.experts, routing.weights, 0, local)
        return ready(MoESaved(routing, dispatcher, rows, None, None))
    choices = dispatcher.dispatch(pack_routing(routing.experts, routing.weights))
    tokens = dispatcher.dispatch(x)

    def received() -> MoESaved:
        rows = sort_by_expert(*unpack_routing(choices.result()), ep.rank * local, local)
        return MoESaved(routing, dispatcher, rows, tokens.result(), None)

    return AsyncResult((*choices.works, *tokens.works), received, choices, tokens)


def _compute_experts(w: MoEWeights, x: Tensor, saved: MoESaved) -> tuple[Tensor, Tensor]:
    """(sum [T', H] over the local experts of each received token, gate_up [R, 2I])."""
    gate_up = _gate_up(w, x, saved)
    # Weights are applied before the down projection, where activations are narrower than after it.
    out = grouped_gemm(weighted_swiglu(gate_up, saved.rows), w.down, saved.rows.offsets)
    return sum_rows(out, saved.rows.positions), gate_up


def _experts_backward(
    w: MoEWeights, g: MoEWeights, x: Tensor, saved: MoESaved, gate_up: Tensor, dout: Tensor
) -> tuple[Tensor, Tensor, list[Wgrad]]:
    """(gradients of the received tokens [T', H] and of their weights [T', K], work for W) from `dout` [T', H]."""
    rows, tokens = saved.rows, x if saved.received is None else saved.received
    dgated = grouped_gemm(gather_rows(dout, rows.tokens, rows.offsets), w.down.transpose(1, 2), rows.offsets)
    dgate_up, gated, drow_weights = weighted_swiglu_backward(dgated, gate_up, rows)
    drows = grouped_gemm(dgate_up, w.gate_up.transpose(1, 2), rows.offsets)
    dweights = torch.where(rows.positions >= 0, drow_weights[rows.positions.clamp(min=0)], 0)
    work: list[Wgrad] = [
        GroupedWgrad(g.down, dout, gated, rows.offsets, rows.tokens, None),
        GroupedWgrad(g.gate_up, dgate_up, tokens, rows.offsets, None, rows.tokens),
    ]
    return sum_rows(drows, rows.positions), dweights, work


def _shared_backward(
    w: MoEWeights, g: MoEWeights, x: Tensor, gate_up: Tensor | None, dy: Tensor
) -> tuple[Tensor | None, list[Wgrad]]:
    """(gradient of the shared expert's gate_up [T, 2Is], work for W); nothing without a shared expert."""
    if gate_up is None or w.shared_down is None:
        return None, []
    assert g.shared_gate_up is not None and g.shared_down is not None
    dgate_up, gated = swiglu_backward(torch.mm(dy, w.shared_down), gate_up)
    return dgate_up, [LinearWgrad(g.shared_down, dy, gated), LinearWgrad(g.shared_gate_up, dgate_up, x)]


def _gate_up(w: MoEWeights, x: Tensor, saved: MoESaved) -> Tensor:
    tokens, rows = x if saved.received is None else saved.received, saved.rows
    return grouped_gemm(gather_rows(tokens, rows.tokens, rows.offsets), w.gate_up, rows.offsets)


def _shared_gate_up(w: MoEWeights, x: Tensor) -> Tensor | None:
    return None if w.shared_gate_up is None else torch.mm(x, w.shared_gate_up.t())


def _microbatch_load(context: LayerContext, routing: Routing) -> AsyncResult[Tensor | None]:
    """The visits of a microbatch's tokens, summed over the cp ranks; None where `routing.load` counts them all."""
    if not _shape(context).aux_loss_coef or context.cp.size == 1:
        return ready(None)
    load = routing.load.clone()
    return AsyncResult((dist.all_reduce(load, group=context.cp.group, async_op=True),), lambda: load)


def _shape(context: LayerContext) -> Experts:
    assert context.model.experts is not None
    return context.model.experts
