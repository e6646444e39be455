"""One pipeline stage: its layers, plus the embedding at the start of the model, or the head and the loss at its end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pentad.kernels.fp8.fp8_tensor import Recipe
from pentad.schedules.passes.recompute import recomputed_parts, saved_rows
from pentad.schedules.spec.model import LayerKind
from pentad.schedules.spec.plan import Plan
from pentad.schedules.spec.tensors import HEAD
from pentad.workers.linear.amax_history import AmaxHistory
from pentad.workers.linear.casts import Casts
from pentad.workers.linear.linear import Linear
from pentad.workers.linear.logit_chunks import HeadWgrad, TokenLoss
from pentad.workers.linear.weight_grad import Param, Params, Wgrad
from pentad.workers.model import lm_head
from pentad.workers.model.base_stage import Activation, BaseStage, StageInputs, activation_storages, storage_id
from pentad.workers.model.layer import Layer, LayerKept, LayerSaved
from pentad.workers.model.layer_context import (
    LayerContext,
    RotaryTable,
    SequenceContext,
    full_tables,
    rotary_tables,
)
from pentad.workers.model.mtp import MTPLayer, MTPSaved
from pentad.workers.model.norm import Norm, SavedNorm
from pentad.workers.parallel.async_ops import Task, run_to_completion
from pentad.workers.parallel.context_parallel import ContextParallelGroup
from pentad.workers.parallel.document_mask import DocumentMask
from pentad.workers.parallel.row_split import RowSplit
from pentad.workers.parallel.sliced_kv_cache import SlicedKVCache
from pentad.workers.params.param_buffers import ParamBuffers, WeightBuffer
from pentad.workers.params.parameters import DTYPES
from pentad.workers.params.router_bias import ExpertLoad, LoadBalancer


class SliceContext(NamedTuple):
    """What layers need to know of a slice of a microbatch: the ranks that share it, masks of packed sequences by a
    layer's window, and angles by a layer's kind; with data-aware groups, the numbers of tokens of the ep group's ranks,
    and which of its own tokens are not padding."""

    cp: ContextParallelGroup
    documents: dict[int, DocumentMask | None]
    rotary: dict[LayerKind, RotaryTable]
    expert_tokens: tuple[int, ...] = ()
    counted: Tensor | None = None


class TokenLosses(NamedTuple):
    """The loss of every token of a slice, [T]; squares only with a z-loss."""

    losses: Tensor
    squared_lse: Tensor | None


class HeadSaved(NamedTuple):
    """What B needs of the last norm, the MTP layers and the losses."""

    norm: SavedNorm  # of rows [T / tp, H]
    loss: lm_head.LossSaved
    mtp: list[MTPSaved]


class StageSaved(NamedTuple):
    """What is saved between F and B; RECOMPUTE fills in what F did not save."""

    inputs: StageInputs
    layers: list[LayerSaved]
    recomputable: list[Any]  # by layer, too, of feed-forward networks
    kept: list[LayerKept]  # by layer, too, if parts of layers are recomputed
    head: HeadSaved | None  # last stage


class BoundParams(NamedTuple):
    """The parameters in their current buffers; all empty if they are not gathered."""

    by_name: Params
    layers: list[Layer]
    norm: Norm | None  # last stage
    head: Linear | None  # likewise
    mtp: list[MTPLayer]


class Stage(BaseStage):
    """Runs the slices of a sequence in order forward and in reverse backward."""

    bound: BoundParams

    def __init__(
        self,
        plan: Plan,
        index: int,
        param_buffers: list[ParamBuffers],
        rank: int = 0,
        frozen: Sequence[WeightBuffer] = (),
        history: AmaxHistory | None = None,
    ) -> None:
        """`history` is that of the rank's state; with None a new one is made if the plan has any."""
        super().__init__(plan, index, param_buffers, frozen)
        stage_of = plan.program.stage_of
        self.ends_stage = self.last or stage_of[index + 1] != stage_of[index]
        self.begins_stage = self.first or stage_of[index - 1] != stage_of[index]
        self.length, self.slices = plan.batch.sequence_length // plan.mesh.cp, plan.program.slices
        parameters, experts, fp8 = param_buffers[0].parameters, plan.model.experts, plan.fp8
        if fp8 is not None:
            recipe = Recipe(fp8.scaling, fp8.gradients, fp8.power_of_two)
            history = history or AmaxHistory.of(plan, index, self.device)
            self.casts = Casts(recipe, self.device, parameters.compute.dtype, history)
        mtp_layers = range(plan.model.layers, plan.model.layers + plan.model.mtp_layers if self.last else 0)
        self.layer_kinds = {number: plan.model.layer_kind(number) for number in (*self.layer_numbers, *mtp_layers)}
        self.rotary_tables = {
            kind: rotary_tables(plan, rank, kind, self.device, parameters.master.dtype)
            for kind in dict.fromkeys(self.layer_kinds.values())
        }
        router_bias = (frozen[0].shard if frozen else parameters).router_bias
        if experts is not None:
            self.expert_load = ExpertLoad(plan.expert_layers(index), experts.num_experts, self.device)
            if router_bias.layers:
                self.load_balancer = LoadBalancer(router_bias, experts.bias_update_rate, self.expert_load)
        self.embedding_scale = 1.0
        if plan.model.scale_embedding:
            self.embedding_scale = torch.tensor(plan.model.hidden**0.5, dtype=DTYPES[plan.dtype]).item()
        # A tied head is the embedding itself on the first stage, and a copy of it called "head" on any other one.
        tied = plan.model.tie_word_embeddings
        self.head_name = "embedding" if tied and self.first else "head"
        self.embedding_name = "embedding" if self.first else "head" if tied else "mtp.embedding"
        self.bind()
        self.kv_caches: dict[int, list[SlicedKVCache]] = {}  # by microbatch, one for each layer
        self.slice_contexts: dict[int, SliceContext] = {}  # by slice index
        self.full_tables = {}
        if plan.batch.capacity or plan.shares_documents:
            given = self.device, parameters.master.dtype
            self.full_tables = {kind: full_tables(plan, kind, *given) for kind in self.rotary_tables}

    def _bind(self, params: Params) -> BoundParams:
        if not params:
            return BoundParams({}, [], None, None, [])
        biases = self.load_balancer.by_name if self.load_balancer else {}
        loads = self.expert_load.by_name if self.expert_load else {}
        params |= {name: Param(tensor, None) for name, tensor in (biases | loads).items()}
        mtp_layers = range(self.model.mtp_layers if self.last else 0)
        ends, fp8 = (self.embedding_name, self.head_name), self.plan.fp8
        head_casts = self.casts if fp8 is not None and fp8.head and self.in_8_bits else None
        return BoundParams(
            params,
            [Layer.bind(params, self.model, number, *self._casts_of(number)) for number in self.layer_numbers],
            Norm.bind_optional(params, "norm", self.model),
            Linear(params[self.head_name], head_casts, name=HEAD) if self.last else None,
            [MTPLayer.bind(params, self.model, index, *ends) for index in mtp_layers],
        )

    def _casts_of(self, layer: int) -> tuple[Casts | None, Casts | None, Casts | None]:
        """The casts of a layer's own products, of its experts', and of its shared expert's."""
        fp8 = self.plan.fp8
        if fp8 is None or not self.in_8_bits or not fp8.covers(layer, self.model.layers):
            return None, None, None
        return self.casts, self.casts if fp8.experts else None, self.casts if fp8.shared_experts else None

    def forward(self, slice_index: int, inputs: StageInputs) -> Task[Activation | None]:
        result, self.saved[slice_index] = yield from self._forward(
            slice_index, inputs, self.recompute_mode, self.layer_context
        )
        return result

    def evaluate(self, slice_index: int, inputs: StageInputs) -> Task[Activation | None]:
        inputs = inputs._replace(mtp_targets=None, mtp_inputs=None)
        result, _ = yield from self._forward(slice_index, inputs, "full", self.layer_context._replace(first_pass=False))
        if (slice_index + 1) % self.slices == 0:
            del self.kv_caches[slice_index // self.slices]
        del self.slice_contexts[slice_index]
        return result

    def _forward(
        self, slice_index: int, inputs: StageInputs, recompute_mode: str, context: LayerContext
    ) -> Task[tuple[Activation | None, StageSaved]]:
        """(what F returns, what this mode saves)."""
        microbatch, slice_number = divmod(slice_index, self.slices)
        if slice_number == 0:
            length = self.length if inputs.share is None else len(inputs.share.positions)
            self.kv_caches[microbatch] = [SlicedKVCache(length) for _ in self.layer_numbers]
        self.slice_contexts[slice_index] = self._slice_context(slice_number, inputs)
        if isinstance(inputs.received, tuple) and recompute_mode == "full":  # so that only one tensor is saved
            inputs = inputs._replace(received=torch.add(*inputs.received))
        branch, stream, saved, losses = yield from self._run_layers(slice_index, inputs, recompute_mode, context)
        if losses is None:
            if stream is None:  # only the embedding has run
                return branch, saved
            return branch + stream if self.ends_stage else (branch, stream), saved
        if inputs.share is None:
            self.loss_sums[microbatch].add_(losses.losses.view(self.loss_sums.shape[1], -1).sum(1))
        else:  # not index_add, which adds in any order on a GPU
            self.loss_sums.view(-1).index_put_((inputs.share.slots,), losses.losses.double(), accumulate=True)
        if losses.squared_lse is not None:
            self.squared_lse[0].add_(losses.squared_lse.sum())
        return None, saved

    def recompute(self, slice_index: int) -> None:
        saved = self.saved[slice_index]
        if self.recompute_mode == "full":
            context = self.layer_context._replace(first_pass=False)
            task = self._run_layers(slice_index, saved.inputs, "none", context)
            self.saved[slice_index] = run_to_completion(task)[2]
            return
        for layer, sequence in zip(self.bound.layers, self._sequences(slice_index), strict=True):
            kept = saved.kept.pop(0)
            split = self._row_split(kept.attention.stream)
            rebuilding = layer.rebuild(self.layer_context, sequence, kept, split)
            layer_saved, recomputable = run_to_completion(rebuilding)
            saved.layers.append(layer_saved)
            saved.recomputable.append(recomputable)

    def backward_input(self, slice_index: int, dy: Tensor | None) -> Task[Tensor | None]:
        microbatch, slice_number = divmod(slice_index, self.slices)
        saved = self.saved.pop(slice_index)
        if saved.head is not None:
            dy, work = self._head_backward(slice_index, saved.head)
            saved = saved._replace(head=None)
            yield from self._defer(slice_index, work)
        assert dy is not None
        layers = list(zip(self.bound.layers, self._sequences(slice_index), strict=True))
        del self.slice_contexts[slice_index]
        if slice_number == 0:
            del self.kv_caches[microbatch]
        for layer, sequence in reversed(layers):
            # Popped and deleted, so that what W does not need is freed before the next layer allocates.
            activations = saved.layers.pop(), saved.recomputable.pop()
            dy, work = yield from layer.backward(self.layer_context, sequence, *activations, dy)
            del activations
            yield from self._defer(slice_index, work)
        if saved.inputs.tokens is None:
            return dy
        embedding = self.bound.by_name["embedding"]
        if self.embedding_scale != 1.0:
            dy = dy * self.embedding_scale
        work = [lm_head.embed_backward(embedding, dy, saved.inputs.tokens, self.layer_context.tp)]
        yield from self._defer(slice_index, work)
        return None

    def _defer(self, slice_index: int, work: list[Wgrad]) -> Task[None]:
        """Leaves a layer's work to W, except that for frozen weights. A local stage, which has nothing to wait for,
        yields here, so that W can follow."""
        self.deferred.setdefault(slice_index, []).extend(each for each in work if each.gradient is not None)
        work.clear()  # the caller's list must not keep alive what W has used
        if self.is_local:
            yield

    def backward_weight(self, slice_index: int) -> None:
        """Recomputes logits with the weights at their current place: ZeRO-3 may have moved them since B."""
        work, head = self.deferred.get(slice_index, []), self.bound.head
        for index, each in enumerate(work):
            if isinstance(each, HeadWgrad) and head is not None:
                work[index] = each._replace(weight=head.weight)
        super().backward_weight(slice_index)

    def offloadable(self, slice_index: int) -> list[torch.UntypedStorage]:
        """Excludes what another stage sent, which may belong to the transport, and keys and values that slices
        share."""
        saved = self.saved[slice_index]
        shared = [x for cache in self.kv_caches[slice_index // self.slices] if cache.buffer for x in cache.buffer]
        received = saved.inputs.received
        excluded = {storage_id(x) for x in (received if self.begins_stage else None, *shared) if isinstance(x, Tensor)}
        return activation_storages(_tensors((received, *saved[1:])), excluded)

    def _run_layers(
        self, slice_index: int, inputs: StageInputs, recompute_mode: str, context: LayerContext
    ) -> Task[tuple[Tensor, Tensor | None, StageSaved, TokenLosses | None]]:
        """(branch, stream, what this mode saves, losses on the last stage); stream is None after the embedding
        alone."""
        branch: Tensor
        stream: Tensor | None = None
        if inputs.tokens is not None:
            branch = lm_head.embed(self.bound.by_name["embedding"], inputs.tokens, context.tp)
            if self.embedding_scale != 1.0:
                branch = branch * self.embedding_scale
        else:
            assert inputs.received is not None
            branch, stream = inputs.received if isinstance(inputs.received, tuple) else (inputs.received, None)
        is_full = recompute_mode == "full"
        saved = StageSaved(inputs if is_full else _without_pair(inputs), [], [], [], None)
        parts = frozenset[str]() if is_full else recomputed_parts(recompute_mode)
        for layer, sequence in zip(self.bound.layers, self._sequences(slice_index), strict=True):
            branch, stream, layer_saved, recomputable = yield from layer.forward(context, sequence, branch, stream)
            if parts:
                split = self._row_split(layer_saved.attention.stream)
                saved.kept.append(layer.keep(layer_saved, recomputable, parts, split))
            elif not is_full:
                saved.layers.append(layer_saved)
                saved.recomputable.append(recomputable)
            del layer_saved, recomputable  # free what is not saved before the next layer allocates
        if inputs.targets is None:
            return branch, stream, saved, None
        head, losses = self._head_forward(slice_index, branch, stream, inputs, context, has_backward=not is_full)
        return branch, stream, saved if is_full else saved._replace(head=head), losses

    def _row_split(self, stream: Tensor) -> RowSplit | None:
        """How RECOMPUTE splits the rows of a residual stream; None if it recomputes all of them."""
        rows = len(stream)
        saved = saved_rows(rows, self.plan.recompute_fraction)
        return RowSplit(rows, saved) if saved else None

    def _head_forward(
        self,
        slice_index: int,
        branch: Tensor,
        stream: Tensor | None,
        inputs: StageInputs,
        context: LayerContext,
        *,
        has_backward: bool,
    ) -> tuple[HeadSaved, TokenLosses]:
        """(what B needs, if `has_backward`; the losses)."""
        head, targets, mtp = self.bound.head, inputs.targets, list[MTPSaved]()
        assert self.bound.norm is not None and head is not None and targets is not None
        normed, saved_norm = self.bound.norm.forward(branch, stream)
        given = context.axes, self._loss(context), context.logit_rows
        loss, losses = lm_head.head_loss(head, normed, targets, *given, has_backward=has_backward)
        layers, mtp_targets = ([], ()) if inputs.mtp_targets is None else (self.bound.mtp, inputs.mtp_targets)
        tokens = (targets, *mtp_targets)[: len(layers)] if inputs.mtp_inputs is None else inputs.mtp_inputs
        for layer, following, further in zip(layers, tokens, mtp_targets, strict=True):
            given_mtp = context, self._mtp_sequence(slice_index), normed, following, further
            normed, saved = layer.forward(*given_mtp, has_backward=has_backward)
            mtp.append(saved)
        squares = lm_head.squared_lse(loss) if self.plan.optimizer.z_loss else None
        return HeadSaved(saved_norm, loss, mtp), TokenLosses(losses, squares)

    def _head_backward(self, slice_index: int, head: HeadSaved) -> tuple[Tensor, list[Wgrad]]:
        """(gradient of the residual stream, work for W)."""
        bound, context, work = self.bound, self.layer_context, list[Wgrad]()
        assert bound.norm is not None and bound.head is not None
        dhidden: Tensor | None = None
        for layer, saved in reversed(list(zip(bound.mtp, head.mtp, strict=True))):
            dhidden, mtp_work = layer.backward(context, self._mtp_sequence(slice_index), saved, dhidden)
            work += mtp_work
        given = context.axes, self._loss(context), context.logit_rows
        dnormed, head_work = lm_head.head_loss_backward(bound.head, head.loss, *given)
        dnormed = dnormed if dhidden is None else dnormed + dhidden
        dstream, norm_work = bound.norm.backward(dnormed, head.norm)
        return dstream, [*work, head_work, norm_work]

    def _loss(self, context: LayerContext) -> TokenLoss:
        return TokenLoss(context.loss_scale, self.model.final_logit_softcapping, self.plan.optimizer.z_loss)

    def _sequences(self, slice_index: int) -> list[SequenceContext]:
        """The sequence context of a slice for each layer."""
        kv_caches = self.kv_caches[slice_index // self.slices]
        layers = zip(self.layer_numbers, kv_caches, strict=True)
        return [self._sequence(slice_index, number, kv_cache) for number, kv_cache in layers]

    def _mtp_sequence(self, slice_index: int) -> SequenceContext:
        """MTP layers run on sequences that are not cut into slices."""
        return self._sequence(slice_index, self.model.layers, SlicedKVCache(self.length))

    def _sequence(self, slice_index: int, number: int, kv_cache: SlicedKVCache) -> SequenceContext:
        kind, shared = self.layer_kinds[number], self.slice_contexts[slice_index]
        documents = shared.documents.get(kind.window)
        given = shared.cp, shared.rotary[kind], kv_cache, kind.window, documents
        return SequenceContext(*given, shared.expert_tokens, shared.counted)

    def _slice_context(self, slice_number: int, inputs: StageInputs) -> SliceContext:
        windows, share = {kind.window for kind in self.layer_kinds.values()}, inputs.share
        if share is not None:
            rotary = self._rotary_at(share.positions, len(share.positions))
            cp, counted = share.group(self.layer_context.pool), share.counted if self.model.experts else None
            given = share.expert_tokens, counted
            return SliceContext(cp, {w: share.document_mask(w) for w in windows}, rotary, *given)
        cp, starts = self.layer_context.cp, inputs.document_starts
        if inputs.positions is not None:
            rotary = self._rotary_at(inputs.positions, self.length)
        else:
            rotary = {kind: tables[slice_number] for kind, tables in self.rotary_tables.items()}
        if not starts:
            return SliceContext(cp, {}, rotary)
        length = self.length * cp.size
        return SliceContext(cp, {w: cp.document_mask(starts, length, self.device, w) for w in windows}, rotary)

    def _rotary_at(self, positions: Tensor, length: int) -> dict[LayerKind, RotaryTable]:
        return {
            kind: RotaryTable(0, length, cos[positions], sin[positions])
            for kind, (cos, sin) in self.full_tables.items()
        }


def _without_pair(inputs: StageInputs) -> StageInputs:
    """Drops a received pair of terms if layers save what they need of it, so that it is freed once read."""
    return inputs._replace(received=None) if isinstance(inputs.received, tuple) else inputs


def _tensors(nested: object) -> Iterator[Tensor]:
    if isinstance(nested, Tensor):
        yield nested
    elif isinstance(nested, tuple | list):
        for each in nested:
            yield from _tensors(each)
