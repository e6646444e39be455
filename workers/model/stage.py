"""One pipeline stage: its layers, with the embedding at the start of the model, the head and the loss at its end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pentad.kernels.rms_norm import rms_norm, rms_norm_backward
from pentad.schedules.spec.plan import Plan
from pentad.workers.model import layer, lm_head, mtp
from pentad.workers.model.layer_context import LayerContext, SequenceContext, Views, rotary_tables
from pentad.workers.model.sliced_kv_cache import SlicedKVCache
from pentad.workers.model.weight_grad import AddWgrad, Wgrad, accumulate_wgrads
from pentad.workers.parallel.async_ops import Task, run_to_completion
from pentad.workers.parallel.context_parallel import ContextParallelGroup, DocumentMask
from pentad.workers.parallel.process_groups import LayerGroups
from pentad.workers.params.param_buffers import BoundBuffers, ParamBuffers
from pentad.workers.params.router_bias import LoadBalancer


class StageInputs(NamedTuple):
    """The arguments of F. Every tp rank has all tokens and targets, but only its part of the residual stream."""

    received: Tensor | None  # [T / tp, H], not on the first stage
    tokens: Tensor | None  # [T], first stage
    targets: Tensor | None  # [T], last stage
    mtp_targets: Tensor | None  # [mtp_layers, T], last stage
    documents: DocumentMask | None


class HeadSaved(NamedTuple):
    """What B needs of the last norm, the MTP layers and the losses."""

    stream: Tensor  # [T / tp, H]
    rstd: Tensor  # [T / tp]
    loss: lm_head.LossSaved
    mtp: list[mtp.MTPSaved]


class StageSaved(NamedTuple):
    """What is saved between F and B; RECOMPUTE fills in what F did not save."""

    inputs: StageInputs
    layers: list[layer.LayerSaved]
    recomputable: list[layer.LayerRecomputable]  # by layer too
    head: HeadSaved | None  # last stage


class StageTensors(NamedTuple):
    """Weights and main gradients: by name, and (weights, gradients) of each layer."""

    weights: Views
    gradients: Views
    layers: list[tuple[layer.LayerWeights, layer.LayerWeights]]
    mtp: list[tuple[mtp.MTPWeights, mtp.MTPWeights]]


class Stage:
    """Implements StageProtocol; what B leaves to W is in `deferred`.

    The slices of a sequence run in order forward and in reverse backward. `recompute_mode` is the plan's: 'none',
    'full' or 'selective'. Until `join` the stage has no other ranks.
    """

    def __init__(self, plan: Plan, index: int, param_buffers: list[ParamBuffers], rank: int = 0) -> None:
        self.model, self.param_buffers, self.recompute_mode = plan.model, param_buffers, plan.recompute_mode(index)
        self.first, self.last, self.is_local = index == 0, index == plan.program.stages - 1, True
        self.length, self.slices = plan.batch.sequence_length // plan.mesh.cp, plan.program.slices
        cp = ContextParallelGroup(scale=plan.model.softmax_scale)
        self.layer_context = LayerContext(plan.model, plan.deterministic, 1.0 / plan.batch.tokens, cp=cp)
        parameters, experts = param_buffers[0].parameters, plan.model.experts
        self.device = parameters.master.device
        self.rotary_tables = rotary_tables(plan, rank, self.device, parameters.master.dtype)
        self.load_balancer: LoadBalancer | None = None
        if experts is not None and parameters.router_bias.layers:
            self.load_balancer = LoadBalancer(parameters.router_bias, experts.bias_update_rate)
        self.layer_numbers = range(*plan.layers[index])
        self.sublayers = [layer.sublayers_of(plan.model, number) for number in self.layer_numbers]
        num_mtp = plan.model.mtp_layers if self.last else 0
        self.mtp_sublayers = [layer.sublayers_of(plan.model, plan.model.layers + number) for number in range(num_mtp)]
        # A tied head is the embedding itself on the first stage, and a copy of it called "head" on any other one.
        tied = plan.model.tie_word_embeddings
        self.head_name = "embedding" if tied and self.first else "head"
        self.embedding_name = "embedding" if self.first else "head" if tied else "predicted.embedding"
        self._tensors: dict[tuple[BoundBuffers, ...], StageTensors] = {}
        self.bind()
        self.saved: dict[int, StageSaved] = {}
        self.kv_caches: dict[int, list[SlicedKVCache]] = {}  # by microbatch, one for each layer
        self.deferred: dict[int, list[Wgrad]] = {}
        self.wgrad_layer = self.dgrad_layer = plan.model.layers + 1  # layers that W and B have reached
        self.loss_sum_buffers = torch.zeros(2, plan.batch.microbatches, dtype=torch.float64, device=self.device)
        self.loss_sums = self.loss_sum_buffers[0]

    def join(self, groups: LayerGroups) -> None:
        self.layer_context = self.layer_context._replace(**groups._asdict())
        self.is_local = groups.is_local

    def bind(self) -> None:
        """Under ZeRO the buffers alternate between a few: the tensors of each are looked up once."""
        buffers = tuple(each.bound for each in self.param_buffers)
        if buffers not in self._tensors:
            self._tensors[buffers] = self._bind(buffers)
        self.tensors = self._tensors[buffers]

    def _bind(self, buffers: Sequence[BoundBuffers]) -> StageTensors:
        weights: Views = dict(self.load_balancer.views) if self.load_balancer else {}
        gradients: Views = {}
        for flat_weights, flat_gradients in buffers:
            if flat_weights is None or flat_gradients is None:
                return StageTensors({}, {}, [], [])
            weights |= flat_weights.tensors
            gradients |= flat_gradients.tensors
        layers = [
            (layer.weights_of(weights, *each), layer.weights_of(gradients, *each))
            for each in zip(self.layer_numbers, self.sublayers, strict=True)
        ]
        names = self.embedding_name, self.head_name
        mtp_layers = [
            (mtp.weights_of(weights, self.model, index, *names), mtp.weights_of(gradients, self.model, index, *names))
            for index in range(len(self.mtp_sublayers))
        ]
        return StageTensors(weights, gradients, layers, mtp_layers)

    def begin(self, step: int) -> None:
        self.loss_sums = self.loss_sum_buffers[step % 2]
        self.loss_sums.zero_()
        for buffers in self.param_buffers:
            buffers.stale = True

    def forward(
        self,
        slice_index: int,
        received: Tensor | None,
        tokens: Tensor | None,
        targets: Tensor | None,
        mtp_targets: Tensor | None = None,
        document_starts: Sequence[Sequence[int]] = (),
    ) -> Task[Tensor | None]:
        microbatch, slice_number = divmod(slice_index, self.slices)
        cp, documents = self.layer_context.cp, None
        if document_starts:
            documents = cp.document_mask(document_starts, self.length * cp.size, self.device)
        inputs = StageInputs(received, tokens, targets, mtp_targets, documents)
        if slice_number == 0:
            self.kv_caches[microbatch] = [SlicedKVCache(self.length) for _ in self.layer_numbers]
        branch, stream, self.saved[slice_index], losses = yield from self._run_layers(
            slice_index, inputs, self.recompute_mode, self.layer_context
        )
        if losses is None:
            return branch + stream
        self.loss_sums[microbatch].add_(losses.sum())
        return None

    def recompute(self, slice_index: int) -> None:
        saved = self.saved[slice_index]
        if self.recompute_mode == "full":
            context = self.layer_context._replace(count_load=False)
            task = self._run_layers(slice_index, saved.inputs, "none", context)
            self.saved[slice_index] = run_to_completion(task)[2]
        else:
            for (weights, _), sublayers, each in zip(self.tensors.layers, self.sublayers, saved.layers, strict=True):
                saved.recomputable.append(layer.recompute(weights, sublayers, self.layer_context, each))

    def backward_input(self, slice_index: int, dy: Tensor | None) -> Task[Tensor | None]:
        microbatch, slice_number = divmod(slice_index, self.slices)
        kv_caches = self.kv_caches[microbatch] if slice_number else self.kv_caches.pop(microbatch)
        saved = self.saved.pop(slice_index)
        self.dgrad_layer = self.model.layers + 1  # W may be called before B has reached a layer
        if saved.head is not None:
            dy, work = self._head_backward(saved.head, saved.inputs)
            saved = saved._replace(head=None)
            yield from self._defer(slice_index, work, self.model.layers)
        assert dy is not None
        layers = list(zip(self.layer_numbers, self.tensors.layers, self.sublayers, kv_caches, strict=True))
        for number, (weights, gradients), sublayers, kv_cache in reversed(layers):
            sequence = SequenceContext(self.rotary_tables[slice_number], kv_cache, saved.inputs.documents)
            # Popped and deleted: what W does not need is free before the next layer allocates.
            activations = saved.layers.pop(), saved.recomputable.pop()
            dy, work = yield from layer.backward(
                weights, gradients, sublayers, self.layer_context, sequence, *activations, dy
            )
            del activations
            yield from self._defer(slice_index, work, number)
        if saved.inputs.tokens is None:
            return dy
        gradient = self.tensors.gradients["embedding"]
        work = lm_head.embed_backward(gradient, dy, saved.inputs.tokens, self.layer_context.tp)
        yield from self._defer(slice_index, work, -1)
        return None

    def backward_weight(self, slice_index: int) -> None:
        """Runs for the layers that B has reached; the executor may call it between the layers of a B."""
        for buffers in self.param_buffers:
            buffers.zero_if_stale()
        accumulate_wgrads(self.deferred.pop(slice_index, []))
        self.wgrad_layer = self.dgrad_layer

    def _defer(self, slice_index: int, work: list[Wgrad], layer_number: int) -> Task[None]:
        """Leaves work of this layer to W. A local stage, which has nothing to wait for, yields here, for W to
        follow."""
        self.deferred.setdefault(slice_index, []).extend(work)
        self.dgrad_layer = layer_number
        work.clear()  # the caller's list must not keep alive what W has used
        if self.is_local:
            yield

    def offloadable(self, slice_index: int) -> list[torch.UntypedStorage]:
        """Without what was received, which is the transport's, the keys and values that slices share, the tokens, and
        statistics of a few bytes a token."""
        saved = self.saved[slice_index]
        shared = [x for cache in self.kv_caches[slice_index // self.slices] if cache.buffer for x in cache.buffer]
        excluded = {x.untyped_storage().data_ptr() for x in (saved.inputs.received, *shared) if x is not None}
        activations = (x for x in _tensors(saved[1:]) if x.is_floating_point() and x.dim() > 1)
        storages = {x.untyped_storage().data_ptr(): x.untyped_storage() for x in activations}
        return [storage for address, storage in storages.items() if address not in excluded]

    def _run_layers(
        self, slice_index: int, inputs: StageInputs, recompute_mode: str, context: LayerContext
    ) -> Task[tuple[Tensor, Tensor, StageSaved, Tensor | None]]:
        """(branch, stream, what this mode saves, losses [T] on the last stage)."""
        microbatch, slice_number = divmod(slice_index, self.slices)
        if inputs.tokens is not None:
            branch = lm_head.embed(self.tensors.weights["embedding"], inputs.tokens, context.tp)
        else:
            assert inputs.received is not None
            branch = inputs.received
        stream: Tensor | None = None
        saved = StageSaved(inputs, [], [], None)
        layers = zip(self.tensors.layers, self.sublayers, self.kv_caches[microbatch], strict=True)
        for (weights, _), sublayers, kv_cache in layers:
            sequence = SequenceContext(self.rotary_tables[slice_number], kv_cache, inputs.documents)
            branch, stream, layer_saved, recomputable = yield from layer.forward(
                weights, sublayers, context, sequence, branch, stream
            )
            if recompute_mode != "full":
                saved.layers.append(layer_saved)
            if recompute_mode == "none":
                saved.recomputable.append(recomputable)
            del layer_saved, recomputable  # what is not saved is free before the next layer allocates
        assert stream is not None
        if inputs.targets is None:
            return branch, stream, saved, None
        head, losses = self._head_forward(branch, stream, inputs, context)
        return branch, stream, saved if recompute_mode == "full" else saved._replace(head=head), losses

    def _head_forward(
        self, branch: Tensor, stream: Tensor, inputs: StageInputs, context: LayerContext
    ) -> tuple[HeadSaved, Tensor]:
        """(what B needs, losses [T])."""
        weights, targets = self.tensors.weights, inputs.targets
        assert targets is not None
        normed, stream, rstd = rms_norm(branch, weights["norm"], self.model.norm_eps, stream)
        loss, losses = lm_head.head_loss(weights[self.head_name], normed, targets, context.tp)
        head, tokens = HeadSaved(stream, rstd, loss, []), targets
        mtp_targets = () if inputs.mtp_targets is None else inputs.mtp_targets
        for (w, _), sublayers, further in zip(self.tensors.mtp, self.mtp_sublayers, mtp_targets, strict=True):
            sequence = self._mtp_sequence(inputs)
            normed, saved = mtp.forward(w, sublayers, context, sequence, normed, tokens, further)
            head.mtp.append(saved)
            tokens = further
        return head, losses

    def _head_backward(self, head: HeadSaved, inputs: StageInputs) -> tuple[Tensor, list[Wgrad]]:
        """(gradient of the residual stream, work for W)."""
        weights, gradients, context = self.tensors.weights, self.tensors.gradients, self.layer_context
        dhidden: Tensor | None = None
        work: list[Wgrad] = []
        mtp_layers = list(zip(self.tensors.mtp, self.mtp_sublayers, head.mtp, strict=True))
        for (w, g), sublayers, saved in reversed(mtp_layers):
            sequence = self._mtp_sequence(inputs)
            dhidden, mtp_work = mtp.backward(w, g, sublayers, context, sequence, saved, dhidden)
            work += mtp_work
        dnormed, head_work = lm_head.head_loss_backward(
            weights[self.head_name], gradients[self.head_name], head.loss, context.loss_scale, context.tp
        )
        dnormed = dnormed if dhidden is None else dnormed + dhidden
        dstream, dnorm = rms_norm_backward(dnormed, head.stream, weights["norm"], head.rstd, None)
        return dstream, [*work, *head_work, AddWgrad(gradients["norm"], dnorm)]

    def _mtp_sequence(self, inputs: StageInputs) -> SequenceContext:
        """MTP layers run on sequences that are not cut into slices."""
        return SequenceContext(self.rotary_tables[0], SlicedKVCache(self.length), inputs.documents)


def _tensors(nested: object) -> Iterator[Tensor]:
    if isinstance(nested, Tensor):
        yield nested
    elif isinstance(nested, tuple | list):
        for each in nested:
            yield from _tensors(each)
