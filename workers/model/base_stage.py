"""What a rank requires of a pipeline stage: any model that implements it trains under every schedule.

`workers.model.stage.Stage` runs pentad's own models, `workers.custom.stage.CustomStage` a user's torch modules.

The executor calls `begin` before the first F of a step. Then, for every slice of a microbatch (the full microbatch
where sequences are not cut), it calls `forward`, `backward_input` and `backward_weight` once each, in this order, in
any interleaving with other slices that the schedule chooses. Where a stage recomputes, `recompute` comes between the
first two. T tokens of a slice, H hidden.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pentad.schedules.spec.plan import Plan
from pentad.workers.linear.casts import Casts
from pentad.workers.linear.fp8_samples import Fp8Samples
from pentad.workers.linear.weight_grad import Param, Params, Wgrad, accumulate_wgrads
from pentad.workers.model.layer_context import LayerContext
from pentad.workers.parallel.async_ops import Task
from pentad.workers.parallel.context_share import ContextShare
from pentad.workers.parallel.process_groups import LayerGroups
from pentad.workers.params.param_buffers import BoundBuffers, NamedBuffer, ParamBuffers, Unwritten, WeightBuffer
from pentad.workers.params.router_bias import ExpertLoad, LoadBalancer, reports_load

Activation = Tensor | tuple[Tensor, Tensor]  # [T, H]; between units of a stage, the two terms of the residual stream


class StageInputs(NamedTuple):
    """What F reads of a slice. Every tp rank has all tokens and targets, but only its part of the residual stream."""

    received: Activation | None = None  # [T / tp, H], not on the first stage; unchanged until B
    tokens: Tensor | None = None  # [T], first stage
    targets: Tensor | None = None  # [T], last stage; -100: no loss
    mtp_targets: Tensor | None = None  # [mtp_layers, T], last stage, targets after those; None in an evaluation
    mtp_inputs: Tensor | None = None  # [mtp_layers, T], tokens that MTP layers read if targets are masked
    document_starts: Sequence[Sequence[int]] = ()  # of packed sequences: positions, by row of the batch
    positions: Tensor | None = None  # [T] in their sequences, if these differ in positions on this rank
    share: ContextShare | None = None  # with data-aware groups, in place of rows of a batch


class BaseStage(ABC):
    """A `slice_index` is microbatch * slices + slice.

    `param_buffers` hold the flat weights that a stage reads and the main gradients that W adds to, those of experts
    separately; `frozen` hold weights without gradients. `saved` is what F leaves for B, and `deferred` what B leaves
    for W, by slice index; clearing `saved` discards the step so far. `loss_sums` [microbatches, rows], float64, are the
    summed token losses of the current step (with data-aware groups, those of all replicas). They alternate between two
    `loss_sum_buffers`, as those of the previous step may still be in flight. `squared_lse` [2] are likewise the sums of
    squared log-sum-exps for z-losses: of the model's logits, and of the stage's routers. Until `join` the stage
    `is_local`: no other rank shares its layers. `recompute_mode` is the plan's.
    """

    load_balancer: LoadBalancer | None = None
    expert_load: ExpertLoad | None = None  # of the current step, if it is counted
    casts: Casts | None = None  # of products in 8 bits
    in_8_bits = True  # where the plan says so
    bound: Any

    def __init__(
        self, plan: Plan, index: int, param_buffers: list[ParamBuffers], frozen: Sequence[WeightBuffer] = ()
    ) -> None:
        self.plan, self.model, self.param_buffers, self.frozen = plan, plan.model, param_buffers, frozen
        self.first, self.last, self.is_local = index == 0, index == plan.program.stages - 1, True
        self.recompute_mode, self.layer_numbers = plan.recompute_mode(index), plan.layers[index].numbers
        scale = 1.0 / plan.batch.tokens  # until `begin` knows the step's numbers of tokens and target tokens
        self.layer_context = LayerContext(plan.model, plan.deterministic, scale, scale, logit_rows=plan.logit_rows)
        if plan.lora is not None:
            self.layer_context = self.layer_context._replace(lora_scale=plan.lora.scale)
        self.device = param_buffers[0].parameters.compute.device
        self._bound: dict[tuple[BoundBuffers | NamedBuffer | bool | None, ...], Any] = {}
        self.saved: dict[int, Any] = {}
        self.deferred: dict[int, list[Wgrad]] = {}
        self.unwritten = Unwritten()
        self.microbatches = plan.batch.microbatches  # of the current step
        microbatches = plan.batch.microbatches * (plan.batch.replicas if plan.batch.capacity else 1)
        sizes = 2, microbatches, plan.batch.micro_batch_size
        self.loss_sum_buffers = torch.zeros(sizes, dtype=torch.float64, device=self.device)
        self.loss_sums = self.loss_sum_buffers[0]
        self.squared_lse_buffers = torch.zeros((2, 2), dtype=torch.float64, device=self.device)
        self.squared_lse = self.squared_lse_buffers[0]

    def join(self, groups: LayerGroups) -> None:
        """From now on, shares the layers with the ranks of these groups."""
        self.layer_context = self.layer_context._replace(**groups._asdict())
        self.is_local = groups.is_local

    def bind(self) -> None:
        """Binds the layers to the current `param_buffers`: under ZeRO-3, weights may be elsewhere in B than in F, or
        nowhere.

        There are only a few different buffers, so the parameters in each are looked up once.
        """
        buffers = *(each.bound for each in self.param_buffers), *(each.weights for each in self.frozen)
        key = *buffers, self.in_8_bits
        if key not in self._bound:
            self._bound[key] = self._bind(self._params())
        self.bound = self._bound[key]
        self.weights_changed()

    def use_8_bits(self, used: bool) -> None:
        """From now on, runs products in 8 bits where the plan says so (`used`), or all in the compute dtype."""
        self.in_8_bits = used
        self.bind()

    def weights_changed(self) -> None:
        """Drops what was derived from the weights: a step begins, or weights have been gathered or freed."""
        if self.casts is not None:
            self.casts.weights_changed()

    def _params(self) -> Params:
        """The parameters by name; empty if some weights are not gathered."""
        params: Params = {}
        for frozen in self.frozen:
            if frozen.weights is None:
                return {}
            params |= {name: Param(weight, None) for name, weight in frozen.weights.tensors.items()}
        for each in self.param_buffers:
            (weights, gradients), narrow = each.bound, each.parameters.in_8_bits
            if weights is None or gradients is None:
                return {}
            scales = narrow.scales if narrow is not None else {}
            given = ((name, weight, gradients.tensors[name]) for name, weight in weights.tensors.items())
            params |= {name: Param(weight, gradient, scales.get(name)) for name, weight, gradient in given}
        return params

    @abstractmethod
    def _bind(self, params: Params) -> Any:
        """The parameters as layers use them; `params` is empty without weights."""

    def begin(self, step: int, microbatches: int, target_tokens: int) -> None:
        """Starts a step of this many microbatches and zeroes its loss sums. Each of the `target_tokens` of the global
        batch has the same weight."""
        self.microbatches = microbatches
        scale = 1.0 / target_tokens if target_tokens else 0.0
        batch = self.plan.batch
        tokens = batch.with_microbatches(min(microbatches, batch.microbatches)).tokens  # longer ones have as many
        self.loss_sums = self.loss_sum_buffers[step % 2].zero_()
        self.squared_lse = self.squared_lse_buffers[step % 2].zero_()
        self.layer_context = self.layer_context._replace(
            loss_scale=scale,
            aux_loss_scale=1.0 / tokens,
            router_squared_lse=self.squared_lse[1],
            count_load=reports_load(step) or (self.load_balancer is not None and self.load_balancer.rate > 0),
        )
        if self.expert_load is not None and self.layer_context.count_load:
            self.expert_load.counts.zero_()
        for buffers in self.param_buffers:
            buffers.begin_step()
        if self.casts is not None and self.plan.fp8 is not None:
            self.casts.begin_step(Fp8Samples() if self.plan.fp8.samples(step) else None)
        self.weights_changed()

    @property
    def constants(self) -> Hashable:
        """The values that this step's instructions take from the host; None if no other step has the same."""
        if self.casts is not None and self.casts.samples is not None:
            return None
        known = self.casts is not None and self.casts.is_known
        context, sums = self.layer_context, self.loss_sums.data_ptr()
        return self.in_8_bits, known, sums, context.loss_scale, context.aux_loss_scale, context.count_load

    def begin_evaluation(self) -> None:
        """Starts a round of an evaluation, while no step is open, and zeroes its loss sums."""
        self.microbatches = self.plan.batch.microbatches
        self.loss_sums.zero_()
        self.weights_changed()

    @contextmanager
    def replaying(self, step: int) -> Iterator[None]:
        """Between two steps: within the block, all replicas of the stage compute the same from the same inputs, in a
        microbatch that counts for no step. Overwrites gradients."""
        self.begin(step, self.plan.batch.microbatches, self.plan.batch.tokens)
        if self.casts is not None:
            self.casts.samples = None
        yield

    @abstractmethod
    def forward(self, slice_index: int, inputs: StageInputs) -> Task[Activation | None]:
        """F: the residual stream [T, H], or None on the last stage, which adds to the loss sums instead."""

    @abstractmethod
    def evaluate(self, slice_index: int, inputs: StageInputs) -> Task[Activation | None]:
        """F of an evaluation: returns and sums losses like `forward`, but saves and counts nothing."""

    @abstractmethod
    def recompute(self, slice_index: int) -> None:
        """RECOMPUTE: rebuilds the activations that F did not save, bit for bit."""

    @abstractmethod
    def backward_input(self, slice_index: int, dy: Tensor | None) -> Task[Tensor | None]:
        """B: the gradient [T, H] of what F received, or None on the first stage; leaves the rest to W.

        `dy` [T, H] is the gradient of what F returned; None on the last stage, where the loss of every target token has
        weight 1 / target tokens of the step.
        """

    def backward_weight(self, slice_index: int) -> None:
        """W: adds to the main gradients, in their precision. Called in microbatch order.

        Covers the layers that B has reached: the executor may call it between the layers of a B.
        """
        for buffers in self.param_buffers:
            buffers.prepare_gradients(self.unwritten)
        accumulate_wgrads(self.deferred.pop(slice_index, []), self.unwritten)

    def complete_gradients(self) -> None:
        """Called after the last W of a sum: zeroes the gradients that no W has written."""
        for gradient in self.unwritten.take_all():
            gradient.zero_()

    @abstractmethod
    def offloadable(self, slice_index: int) -> list[torch.UntypedStorage]:
        """Memory that only this slice uses between F and B: OFFLOAD moves it to the host, RELOAD brings it back."""


def storage_id(tensor: Tensor) -> int:
    """Identifies a storage, even of fake tensors."""
    return tensor.untyped_storage()._cdata


def activation_storages(tensors: Iterable[Tensor], excluded: set[int]) -> list[torch.UntypedStorage]:
    """The distinct storages of activations, except those `excluded` by id. Integer tensors and statistics of a few
    bytes a token are not included."""
    activations = (tensor for tensor in tensors if tensor.is_floating_point() and tensor.dim() > 1)
    storages = {storage_id(tensor): tensor.untyped_storage() for tensor in activations}
    return [storage for key, storage in storages.items() if key not in excluded]
