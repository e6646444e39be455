"""The mixture-of-experts sublayer: route, dispatch, compute, combine, and the mirror image in the backward.

Experts are distributed over the ep ranks, and their intermediate sizes, like the shared expert's, split over the tp
ranks: these gather all tokens, route them identically, compute partial results and reduce-scatter the sums.

T tokens of the tp group, H hidden, E experts, `local` of them on this rank, I the intermediate size here, K experts per
token. T' tokens received from the ranks of the ep group make R rows: one for each local expert of each token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from pentad.kernels.glu import Activation
from pentad.kernels.moe.moe_permute import ExpertRows, sort_by_expert, sum_rows, values_of_choices
from pentad.schedules.spec.model import Experts, ModelSpec
from pentad.workers.linear.casts import Casts, Operand, RowOperand
from pentad.workers.linear.grouped_linear import (
    GroupedLinear,
    dispatch,
    gathered,
    operand,
    weighted_glu,
    weighted_glu_backward,
)
from pentad.workers.linear.linear import plain
from pentad.workers.linear.weight_grad import LinearWgrad, Param, Params, Wgrad, bias_wgrad
from pentad.workers.model import router
from pentad.workers.model.expert_biases import ExpertBiases
from pentad.workers.model.layer_context import LayerContext, SequenceContext
from pentad.workers.model.lora import ExpertAdapter
from pentad.workers.model.mlp import MLP
from pentad.workers.model.router import Routing
from pentad.workers.parallel.async_ops import AsyncResult, Task, gather2, ready
from pentad.workers.parallel.expert_parallel import (
    Dispatcher,
    ExpertParallelGroup,
    LocalDispatcher,
    make_dispatcher,
    pack_routing,
    unpack_routing,
)

MakeDgated = Callable[[], tuple[Operand, Tensor]]


class MoESaved(NamedTuple):
    """Activations that are expensive to compute or came from other ranks."""

    routing: Routing
    dispatcher: Dispatcher
    rows: ExpertRows
    received: RowOperand | None  # [T', H], None if tokens stay on this rank
    load: Tensor | None  # [E], visits of the full microbatch, for the load-balancing loss


class MoERecomputable(NamedTuple):
    """Activations that can be rebuilt without communication with the ranks of other experts."""

    gate_up: Tensor  # [R, 2I]
    shared_gate_up: Tensor | None  # [T, 2Is]


class MoE(NamedTuple):
    """Matrices are [out, in]."""

    router: Param  # [E, H]
    gate_up: GroupedLinear  # [local, 2I, H]
    down: GroupedLinear  # [local, H, I]
    shared: MLP | None  # of intermediate size Is
    act: Activation
    biases: ExpertBiases | None
    bias: Tensor | None = None  # [E], added to the scores when experts are chosen
    load: Tensor | None = None  # [E] int64, the visits in steps that count them
    gate_up_adapter: ExpertAdapter | None = None
    down_adapter: ExpertAdapter | None = None

    @classmethod
    def bind(
        cls,
        params: Params,
        prefix: str,
        model: ModelSpec,
        casts: Casts | None = None,
        shared_casts: Casts | None = None,
    ) -> MoE:
        """With `casts`, the products of experts are in 8 bits; with `shared_casts`, those of the shared expert."""
        router = params[f"{prefix}.experts.router"]
        gate_up, down = (GroupedLinear.bind(params, f"{prefix}.experts.{name}", casts) for name in ("gate_up", "down"))
        shared = (
            MLP.bind(params, f"{prefix}.shared", model, shared_casts) if f"{prefix}.shared.down" in params else None
        )
        biases = ExpertBiases.bind(params, prefix)
        adapters = (ExpertAdapter.bind(params, f"{prefix}.experts.{name}_proj") for name in ("gate_up", "down"))
        bias, load = (
            param and param.weight for param in map(params.get, (f"{prefix}.experts.bias", f"{prefix}.experts.load"))
        )
        return cls(router, gate_up, down, shared, model.hidden_act, biases, bias, load, *adapters)

    @property
    def caster(self) -> None:
        """None: the router multiplies in the compute dtype."""

    def only_w_reads(self, context: LayerContext) -> bool:
        return False

    def forward(
        self, context: LayerContext, sequence: SequenceContext, x: Tensor
    ) -> Task[tuple[Tensor, MoESaved, MoERecomputable]]:
        full, make_shared_gate_up = yield from self._gather(context, x)
        local, router_bias = self.gate_up.weight.shape[0], self.biases and self.biases.router.weight
        given = self.router.weight, self.bias, _shape(context), router_bias
        routing = router.route(full, *given, sequence.counted)
        dispatcher = yield from make_dispatcher(routing.experts, local, context.ep, sequence.expert_tokens)
        in_flight = self._dispatch(full, routing, dispatcher, context.ep)
        shared_gate_up, is_sent = make_shared_gate_up(), not isinstance(dispatcher, LocalDispatcher)
        shared = self._shared_down(context, shared_gate_up) if is_sent else None  # while tokens are in flight
        saved = yield from in_flight
        del in_flight  # frees the rows that were sent, too
        partial, gate_up = self._compute_experts(context, full, saved)
        out = yield from dispatcher.combine(partial)
        if shared is not None:
            out = out + shared
        if context.first_pass and routing.logits is not None and context.router_squared_lse is not None:
            squares = routing.logits.logsumexp(1).double().square()
            counted = squares if routing.counted is None else squares * routing.counted
            context.router_squared_lse.add_(counted.sum())
        if context.first_pass and context.count_load and self.load is not None:
            self.load.add_(routing.load)
        scattered = context.tp.reduce_scatter(out) if is_sent else self._scatter(context, out, shared_gate_up)
        y, load = yield from gather2(scattered, _microbatch_load(context, sequence, routing))
        return y, saved._replace(load=load), MoERecomputable(gate_up, shared_gate_up)

    def recompute(self, context: LayerContext, x: Tensor, saved: MoESaved) -> MoERecomputable:
        full, make_shared_gate_up = self._gather(context, x).wait()
        return MoERecomputable(self._gate_up(context, full, saved), make_shared_gate_up())

    def backward(
        self,
        context: LayerContext,
        sequence: SequenceContext,
        x: Tensor,
        saved: MoESaved,
        recomputable: MoERecomputable,
        dy: Tensor,
    ) -> Task[tuple[Tensor, list[Wgrad]]]:
        shape, scale = _shape(context), context.aux_loss_scale / context.tp.size  # dx is summed over the tp ranks
        x, (dy, make_dgated) = yield from gather2(context.tp.all_gather(x), self._gather_gradient(context, dy))
        dout = yield from dispatch(saved.dispatcher, operand(self.down, dy, "gradient"))
        dtokens, dweights, work = self._experts_backward(context, x, saved, recomputable.gate_up, dout)
        in_flight = gather2(saved.dispatcher.combine(dtokens), saved.dispatcher.combine(dweights))
        dshared_gate_up, shared_work = self._shared_backward(context, x, recomputable.shared_gate_up, make_dgated)
        dtokens, dweights = yield from in_flight
        has_aux_loss = shape.aux_loss_coef and scale
        dshares = router.aux_loss_grad(saved.routing, shape, scale, saved.load) if has_aux_loss else None
        z_scale = shape.router_z_loss_coef * scale
        dlogits, dx = router.backward(saved.routing, self.router.weight, shape, dweights, dshares, z_scale)
        if self.biases is not None:
            work.append(bias_wgrad(self.biases.router, dlogits))
        dx += dtokens
        if dshared_gate_up is None or self.shared is None:
            dx = yield from context.tp.reduce_scatter(dx)
        else:
            dx = yield from self.shared.gate_up.input_grad_scattered(context.axes, dshared_gate_up, dx)
        return dx, [*work, LinearWgrad(self.router.gradient, dlogits, x), *shared_work]

    def _dispatch(
        self, x: Tensor, routing: Routing, dispatcher: Dispatcher, ep: ExpertParallelGroup
    ) -> AsyncResult[MoESaved]:
        """Sends tokens, with their experts and weights, to the ranks of the experts."""
        local = self.gate_up.weight.shape[0]
        if isinstance(dispatcher, LocalDispatcher):
            rows = sort_by_expert(routing.experts, routing.weights, 0, local)
            return ready(MoESaved(routing, dispatcher, rows, None, None))
        choices = dispatcher.dispatch(pack_routing(routing.experts, routing.weights))

        def received(choices_and_tokens: tuple[Tensor, RowOperand]) -> MoESaved:
            packed, tokens = choices_and_tokens
            rows = sort_by_expert(*unpack_routing(packed), ep.rank * local, local)
            return MoESaved(routing, dispatcher, rows, tokens, None)

        return gather2(choices, dispatch(dispatcher, operand(self.gate_up, x, "activation"))).then(received)

    def _compute_experts(self, context: LayerContext, x: Tensor, saved: MoESaved) -> tuple[Tensor, Tensor]:
        """(sum [T', H] over the local experts of each received token, gate_up [R, 2I])."""
        gate_up = self._gate_up(context, x, saved)
        # Weights are applied before the down projection, where activations are narrower than after it.
        gated = weighted_glu(self.down.casts, gate_up, saved.rows, self.act)
        out = self.down.forward(gated, saved.rows.offsets)
        if self.down_adapter is not None:
            self.down_adapter.add_(context, plain(gated), saved.rows.offsets, out)
        if self.biases is not None:
            self.biases.add_down_(out, saved.rows, 1.0 / context.tp.size)
        return sum_rows(out, saved.rows.positions), gate_up

    def _experts_backward(
        self, context: LayerContext, x: Tensor, saved: MoESaved, gate_up: Tensor, dout: RowOperand
    ) -> tuple[Tensor, Tensor, list[Wgrad]]:
        """(gradients of the received tokens [T', H] and of their weights [T', K], work for W) from `dout` [T', H]."""
        rows, tokens, share = saved.rows, self._tokens(x, saved), 1.0 / context.tp.size
        dout_rows, index = gathered(dout, rows)
        dgated = self.down.input_grad(dout_rows, rows.offsets, index)
        down, up = self.down_adapter, self.gate_up_adapter
        dnarrow = down and down.input_grad_(context, plain(dout_rows), rows.offsets, dgated)
        dgate_up, gated, drow_weights = weighted_glu_backward(self.down.casts, dgated, gate_up, rows, self.act)
        if self.biases is not None:
            drow_weights = drow_weights + self.biases.weights_backward(plain(dout_rows), rows, share)
        del dout_rows  # free them before the next product
        drows = self.gate_up.input_grad(dgate_up, rows.offsets)
        dweights = values_of_choices(drow_weights, rows.positions)
        work: list[Wgrad] = [
            self.down.wgrad(dout, gated, rows.offsets, rows.tokens, None),
            self.gate_up.wgrad(dgate_up, tokens, rows.offsets, None, rows.tokens),
        ]
        if self.biases is not None:
            work += self.biases.wgrads(plain(dgate_up), plain(dout), rows, share)
        if down is not None and dnarrow is not None:
            work += down.wgrads(context, plain(dout), plain(gated), dnarrow, rows.offsets, rows.tokens, None)
        if up is not None:
            dgates, dnarrow = plain(dgate_up), up.input_grad_(context, plain(dgate_up), rows.offsets, drows)
            work += up.wgrads(context, dgates, plain(tokens), dnarrow, rows.offsets, None, rows.tokens)
        return sum_rows(drows, rows.positions), dweights, work

    def _shared_backward(
        self, context: LayerContext, x: Tensor, gate_up: Tensor | None, make_dgated: MakeDgated | None
    ) -> tuple[Operand | None, list[Wgrad]]:
        """(gradient of the shared expert's gate_up [T, 2Is], work for W); nothing without a shared expert."""
        if gate_up is None or self.shared is None or make_dgated is None:
            return None, []
        up, down, axes = self.shared.gate_up, self.shared.down, context.axes
        doutput, dgated = make_dgated()
        dgate_up, gated = down.glu_backward(axes, dgated, gate_up, self.act, up.name)
        return dgate_up, [down.wgrad(doutput, gated), up.wgrad(dgate_up, up.input(axes, x, columns=True))]

    def _gate_up(self, context: LayerContext, x: Tensor, saved: MoESaved) -> Tensor:
        rows = saved.rows
        tokens, index = gathered(self._tokens(x, saved), rows)
        gate_up = self.gate_up.forward(tokens, rows.offsets, index)
        if self.gate_up_adapter is not None:
            self.gate_up_adapter.add_(context, plain(tokens), rows.offsets, gate_up)
        if self.biases is not None:
            self.biases.add_gate_up_(gate_up, rows)
        return gate_up

    def _tokens(self, x: Tensor, saved: MoESaved) -> RowOperand:
        return operand(self.gate_up, x, "activation") if saved.received is None else saved.received

    def _gather(self, context: LayerContext, x: Tensor) -> AsyncResult[tuple[Tensor, Callable[[], Tensor | None]]]:
        """(all tokens [T, H], a function that completes the shared expert's gate_up [T, 2Is]); this rank's part of
        gate_up is computed while the tokens arrive."""
        if self.shared is None:
            return context.tp.all_gather(x).then(lambda full: (full, lambda: None))
        return self.shared.gate_up.gather_forward(context.axes, x).then(lambda both: (plain(both[0]), both[1]))

    def _gather_gradient(self, context: LayerContext, dy: Tensor) -> AsyncResult[tuple[Tensor, MakeDgated | None]]:
        """The same for the gradient: the function returns it as an operand of W, and the gradient [T, Is] of the shared
        expert's gated unit."""
        if self.shared is None:
            return context.tp.all_gather(dy).then(lambda full: (full, None))
        return self.shared.down.gather_input_grad(context.axes, dy)

    def _shared_down(self, context: LayerContext, gate_up: Tensor | None) -> Tensor | None:
        if self.shared is None or gate_up is None:
            return None
        down = self.shared.down
        return down.forward(context.axes, down.glu(context.axes, gate_up, self.act))

    def _scatter(self, context: LayerContext, out: Tensor, gate_up: Tensor | None) -> AsyncResult[Tensor]:
        """This rank's rows [T / tp, H] of the sum over the tp ranks of `out` and the shared expert's result."""
        if self.shared is None or gate_up is None:
            return context.tp.reduce_scatter(out)
        down = self.shared.down
        return down.forward_scattered(context.axes, down.glu(context.axes, gate_up, self.act), out)


def _microbatch_load(context: LayerContext, sequence: SequenceContext, routing: Routing) -> AsyncResult[Tensor | None]:
    """The visits of a microbatch's tokens, summed over the ranks that share it: the cp ranks, or those of a data-aware
    group; None if `routing.load` includes them all."""
    cp = context.cp if sequence.counted is None else sequence.cp
    return cp.sum(routing.load) if _shape(context).aux_loss_coef and cp.size > 1 else ready(None)


def _shape(context: LayerContext) -> Experts:
    assert context.model.experts is not None
    return context.model.experts
