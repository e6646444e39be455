"""One pipeline stage: its layers, with the embedding at the front of the model and the head and loss at its end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from pentad.kernels.rms_norm import rms_norm, rms_norm_backward
from pentad.schedules.spec.plan import Plan
from pentad.workers.model import layer, lm_head, mtp
from pentad.workers.model.layer_context import Around, Place
from pentad.workers.model.positions import rotations
from pentad.workers.model.sliced_kv_cache import SlicedKVCache
from pentad.workers.model.weight_grad import Deferred, Sum, accumulate
from pentad.workers.parallel.async_ops import Turns, run_to_completion
from pentad.workers.parallel.context_parallel import Context, Documents
from pentad.workers.parallel.process_groups import Inner
from pentad.workers.params.param_buffers import ParamBuffers
from pentad.workers.params.router_bias import Balance


class Ending(NamedTuple):
    """What B needs of the last norm, the head and the loss."""

    stream: torch.Tensor  # [T, H]
    scale: torch.Tensor  # [T]
    scores: lm_head.Scores
    predicted: list[mtp.Saved]


class Given(NamedTuple):
    """What F gets: a result of the stage before, or tokens on the first stage; targets on the last one. Tensor ranks
    have parts of the results, but all tokens and targets."""

    received: torch.Tensor | None  # [T / tp, H]
    tokens: torch.Tensor | None  # [T]
    targets: torch.Tensor | None  # [T]
    further: torch.Tensor | None  # [predicted, T]
    documents: Documents | None


class Kept(NamedTuple):
    """What a piece keeps between F and B; where a stage recomputes, RECOMPUTE fills in what F left out."""

    given: Given
    roots: list[layer.Roots]  # a layer each
    leaves: list[layer.Leaves]
    ending: Ending | None  # last stage


class Bound(NamedTuple):
    """Weights and gradients by name, and those of each layer."""

    weights: layer.Views
    gradients: layer.Views
    layers: list[tuple[layer.Weights, layer.Weights]]
    predicted: list[tuple[mtp.Weights, mtp.Weights]]


class Stage:
    """Runs F, B and W of its layers; keeps activations from F to B and (x, dY) from B to W, by piece: a microbatch or,
    where sequences are cut, one of its slices. Those run in order forward and in reverse backward, T tokens each.

    `mode` is the plan's for this stage: what F is not to keep is made again, with the same bits, by `recompute`.
    `banks` hold its parameters, those of experts in one of their own. Until `join` it is alone with its layers.

    `loss_sums` [microbatches], float64, are the sums of their tokens' losses, on the last stage and of the
    step that was begun last; tensor ranks have the same ones.
    """

    def __init__(self, plan: Plan, index: int, banks: list[ParamBuffers], rank: int = 0) -> None:
        self.model, self.index, self.banks = plan.model, index, banks
        self.first, self.last = index == 0, index == plan.program.stages - 1
        self.mode = plan.mode(index)
        one_rank = Context(scale=plan.model.softmax_scale)
        self.around = Around(plan.model, plan.deterministic, 1.0 / plan.batch.tokens, context=one_rank)
        master = banks[0].parameters.master
        device = master.device
        self.is_alone = True
        self.length, self.slices = plan.batch.length // plan.mesh.cp, plan.program.slices
        self.rotations = rotations(plan, rank, device, master.dtype)
        biases, experts = banks[0].parameters.biases, plan.model.experts
        self.balance = Balance(biases, experts.bias_update_rate) if experts and biases.layers else None
        self.span = range(*plan.layers[index])
        self.words = (
            "embedding" if plan.model.tie_word_embeddings and self.first else "head"
        )  # what the head multiplies with
        copy = "head" if plan.model.tie_word_embeddings else "predicted.embedding"
        self.names = ("embedding" if self.first else copy, self.words)  # for layers that predict further tokens
        ahead = range(plan.model.layers, plan.model.layers + plan.model.mtp_layers if self.last else plan.model.layers)
        self.halves_ahead = [layer.halves_of(plan.model, number) for number in ahead]
        self.halves = [layer.halves_of(plan.model, number) for number in self.span]
        self.bound: dict[tuple[int, ...], Bound] = {(): Bound({}, {}, [], [])}
        self.bind()
        self.kept: dict[int, Kept] = {}
        self.pasts: dict[int, list[SlicedKVCache]] = {}  # by microbatch, of every layer
        self.deferred: dict[int, list[Deferred]] = {}
        self.reached = self.left = plan.model.layers + 1
        self.sums = torch.zeros(2, plan.batch.microbatches, dtype=torch.float64, device=device)
        self.loss_sums = self.sums[0]

    def join(self, inner: Inner) -> None:
        """From here on its layers are shared with these ranks."""
        self.around = self.around._replace(**inner._asdict())
        self.is_alone = inner.is_alone

    def bind(self) -> None:
        """After a bank has changed its buffers: what the layers read and add to. With neither, there are no layers."""
        whole = all(bank.weights and bank.gradients for bank in self.banks)
        at = tuple(id(views) for bank in self.banks for views in (bank.weights, bank.gradients)) if whole else ()
        if at not in self.bound:
            weights, gradients = ({k: v for bank in self.banks for k, v in of(bank).items()} for of in (_read, _added))
            weights |= self.balance.views if self.balance else {}
            each = zip(self.span, self.halves, strict=True)
            layers = [(layer.weights_of(weights, *of), layer.weights_of(gradients, *of)) for of in each]
            numbers = range(self.model.mtp_layers if self.last else 0)
            of_ahead = [(self.model, number, self.names) for number in numbers]
            ahead = [(mtp.weights_of(weights, *of), mtp.weights_of(gradients, *of)) for of in of_ahead]
            self.bound[at] = Bound(weights, gradients, layers, ahead)
        self.now = self.bound[at]

    def begin(self, step: int) -> None:
        """Before the first F of a step. Sums of the step before may still be on their way to the other ranks."""
        self.loss_sums = self.sums[step % 2]
        self.loss_sums.zero_()
        for bank in self.banks:
            bank.stale = True

    def forward(
        self,
        piece: int,
        received: torch.Tensor | None,
        tokens: torch.Tensor | None,
        targets: torch.Tensor | None,
        further: torch.Tensor | None = None,
        starts: Sequence[Sequence[int]] = (),
    ) -> Turns[torch.Tensor | None]:
        """F. `received` [T, H] is the stage before's result, `tokens` and `targets` [T] are for the first and last
        stage, `further` [predicted, T] are the tokens behind the targets, `starts` of packed sequences are, by row,
        where documents begin. Returns the residual stream [T, H], nothing on the last stage."""
        microbatch, number = divmod(piece, self.slices)
        context, whole = self.around.context, self.length * self.around.context.size
        documents = context.documents(starts, whole, self.sums.device) if starts else None
        given = Given(received, tokens, targets, further, documents)
        if number == 0:
            self.pasts[microbatch] = [SlicedKVCache(self.length) for _ in self.now.layers]
        branch, stream, self.kept[piece], losses = yield from self._through(piece, given, self.mode, self.around)
        if losses is None:
            return branch + stream
        self.loss_sums[microbatch].add_(losses.sum())
        return None

    def recompute(self, piece: int) -> None:
        """RECOMPUTE: makes what F did not keep. The losses have been counted."""
        kept = self.kept[piece]
        if self.mode == "full":
            again = self.around._replace(counted=False)
            self.kept[piece] = run_to_completion(self._through(piece, kept.given, "none", again))[2]
        else:
            each = zip(self.now.layers, self.halves, kept.roots, strict=True)
            kept.leaves.extend(layer.leaves(w, halves, self.around, roots) for (w, _), halves, roots in each)

    def backward_input(self, piece: int, dy: torch.Tensor | None) -> Turns[torch.Tensor | None]:
        """B. `dy` [T, H] is the gradient of this stage's result, nothing on the last stage. Returns the gradient of
        what F received, nothing on the first stage."""
        microbatch, number = divmod(piece, self.slices)
        pasts = self.pasts[microbatch] if number else self.pasts.pop(microbatch)
        kept = self.kept.pop(piece)
        self.left = self.model.layers + 1  # W may be called before B has come down to a layer
        if kept.ending is not None:
            dy, work = self._end_backward(kept.ending, kept.given)
            kept = kept._replace(ending=None)
            yield from self._defer(piece, work, self.model.layers)
        assert dy is not None
        layers = list(zip(self.span, self.now.layers, self.halves, pasts, strict=True))
        for layer_number, (weights, gradients), halves, past in reversed(layers):
            # popped, so that what W does not need is freed before the next layer needs memory
            place = Place(self.rotations[number], past, kept.given.documents)
            saved = (kept.roots.pop(), kept.leaves.pop())
            dy, work = yield from layer.backward(weights, gradients, halves, self.around, place, *saved, dy)
            del saved
            yield from self._defer(piece, work, layer_number)
        tokens = kept.given.tokens
        if tokens is None:
            return dy
        work = lm_head.embed_backward(self.now.gradients["embedding"], dy, tokens, self.around.tensor)
        yield from self._defer(piece, work, -1)
        return None

    def backward_weight(self, piece: int) -> None:
        """W, of as much as B has got to."""
        for bank in self.banks:
            bank.freshen()
        accumulate(self.deferred.pop(piece, []))
        self.reached = self.left

    def _defer(self, piece: int, work: list[Deferred], layer_number: int) -> Turns[None]:
        """Leaves it to W, which may follow at once: with no other rank to wait for, a turn ends here. B has come down
        to this layer."""
        self.deferred.setdefault(piece, []).extend(work)
        self.left = layer_number
        work.clear()  # what W has done with is free, whoever called this
        if self.is_alone:
            yield

    def movable(self, piece: int) -> list[torch.UntypedStorage]:
        """What OFFLOAD takes: memory that this piece alone keeps. What was received stays, it is the transport's, and
        so do keys and values that slices share, the tokens, and statistics of a few bytes a token."""
        kept = self.kept[piece]
        rooms = [room for past in self.pasts[piece // self.slices] if past.room for room in past.room]
        stays = {each.untyped_storage().data_ptr() for each in (kept.given.received, *rooms) if each is not None}
        found = (each for each in _tensors(kept[1:]) if each.is_floating_point() and each.dim() > 1)
        storages = {each.untyped_storage().data_ptr(): each.untyped_storage() for each in found}
        return [storage for address, storage in storages.items() if address not in stays]

    def _through(
        self, piece: int, given: Given, mode: str, around: Around
    ) -> Turns[tuple[torch.Tensor, torch.Tensor, Kept, torch.Tensor | None]]:
        """One piece through all layers, and on the last stage through the head: (branch, stream, what `mode` keeps,
        losses [T])."""
        microbatch, number = divmod(piece, self.slices)
        kept, losses = Kept(given, [], [], None), None
        if given.tokens is not None:
            branch = lm_head.embed(self.now.weights["embedding"], given.tokens, self.around.tensor)
        else:
            assert given.received is not None
            branch = given.received
        stream: torch.Tensor | None = None
        for (weights, _), halves, past in zip(self.now.layers, self.halves, self.pasts[microbatch], strict=True):
            place = Place(self.rotations[number], past, given.documents)
            branch, stream, roots, leaves = yield from layer.forward(weights, halves, around, place, branch, stream)
            kept.roots.extend([roots] if mode != "full" else [])
            kept.leaves.extend([leaves] if mode == "none" else [])
            del roots, leaves  # what is not kept is free before the next layer needs memory
        assert stream is not None
        if given.targets is not None:
            ending, losses = self._end(branch, stream, given, around)
            kept = kept if mode == "full" else kept._replace(ending=ending)
        return branch, stream, kept, losses

    def _end(
        self, branch: torch.Tensor, stream: torch.Tensor, given: Given, around: Around
    ) -> tuple[Ending, torch.Tensor]:
        weights, targets = self.now.weights, given.targets
        assert targets is not None
        normed, entry, scale = rms_norm(branch, weights["norm"], self.model.norm_eps, stream)
        scores, losses = lm_head.score(weights[self.words], normed, targets, self.around.tensor)
        further, hidden, tokens = [], normed, targets
        targets_ahead = () if given.further is None else given.further
        for (own, _), halves, behind in zip(self.now.predicted, self.halves_ahead, targets_ahead, strict=True):
            hidden, saved = mtp.forward(own, halves, around, self._ahead(given), hidden, tokens, behind)
            further.append(saved)
            tokens = behind
        return Ending(entry, scale, scores, further), losses

    def _end_backward(self, ending: Ending, given: Given) -> tuple[torch.Tensor, list[Deferred]]:
        weights, gradients, *_ = self.now
        tensor, scale = self.around.tensor, self.around.loss_scale
        dhidden: torch.Tensor | None = None
        work: list[Deferred] = []
        ahead = zip(self.now.predicted, self.halves_ahead, ending.predicted, strict=True)
        for (own, gradient), halves, saved in reversed(list(ahead)):
            dhidden, more = mtp.backward(own, gradient, halves, self.around, self._ahead(given), saved, dhidden)
            work += more
        dnormed, more = lm_head.score_backward(weights[self.words], gradients[self.words], ending.scores, scale, tensor)
        dnormed = dnormed if dhidden is None else dnormed + dhidden
        dstream, dnorm = rms_norm_backward(dnormed, ending.stream, weights["norm"], ending.scale, None)
        return dstream, [*work, *more, Sum(gradients["norm"], dnorm)]

    def _ahead(self, given: Given) -> Place:
        """Of layers that predict further tokens: sequences are whole there."""
        return Place(self.rotations[0], SlicedKVCache(self.length), given.documents)


def _read(bank: ParamBuffers) -> layer.Views:
    return bank.weights


def _added(bank: ParamBuffers) -> layer.Views:
    return bank.gradients


def _tensors(nested: object) -> Iterator[torch.Tensor]:
    if isinstance(nested, torch.Tensor):
        yield nested
    elif isinstance(nested, tuple | list):
        for each in nested:
            yield from _tensors(each)
