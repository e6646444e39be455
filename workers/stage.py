"""One pipeline stage: its layers, with the embedding at the front of the model and the head and loss at its end."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from pentad.kernels.cross_entropy import cross_entropy, cross_entropy_backward_
from pentad.kernels.rms_norm import rms_norm, rms_norm_backward
from pentad.kernels.rope import rope_tables
from pentad.schedules.plan import Plan
from pentad.workers import layer
from pentad.workers.parameters import Parameters
from pentad.workers.past import Past
from pentad.workers.weights import Deferred, Lookup, Product, Sum, accumulate


class Ending(NamedTuple):
    """What B needs of the head and the loss."""

    stream: torch.Tensor  # [T, H]
    scale: torch.Tensor  # [T]
    normed: torch.Tensor  # [T, H]
    logits: torch.Tensor  # [T, V]
    lse: torch.Tensor  # [T]
    targets: torch.Tensor  # [T]


class Given(NamedTuple):
    """What F gets: a result of the stage before, or tokens on the first stage; targets on the last one."""

    received: torch.Tensor | None  # [T, H]
    tokens: torch.Tensor | None  # [T]
    targets: torch.Tensor | None  # [T]


class Kept(NamedTuple):
    """What a piece keeps between F and B; where a stage recomputes, RECOMPUTE fills in what F left out."""

    given: Given
    roots: list[layer.Roots]  # a layer each
    leaves: list[layer.Leaves]
    ending: Ending | None  # last stage


class Bound(NamedTuple):
    """Parts of a whole flat buffer: by name, and those of each layer."""

    views: dict[str, torch.Tensor]
    layers: list[layer.Weights]


class Stage:
    """Runs F, B and W of its layers; keeps activations from F to B and (x, dY) from B to W, by piece: a microbatch or,
    where sequences are cut, one of its slices. Those run in order forward and in reverse backward, T tokens each.

    `mode` is the plan's for this stage: what F is not to keep is made again, with the same bits, by `recompute`.

    `loss_sums` [microbatches], float64, are the sums of their tokens' losses, on the last stage and of the
    step that was begun last.
    """

    def __init__(self, plan: Plan, index: int, parameters: Parameters) -> None:
        self.model, self.index, self.parameters = plan.model, index, parameters
        self.first, self.last = index == 0, index == plan.program.stages - 1
        self.deterministic, self.mode = plan.deterministic, plan.mode(index)
        self.loss_scale = 1.0 / plan.batch.tokens
        device, dtype = parameters.master.device, parameters.master.dtype
        self.length, self.slices = plan.batch.length, plan.program.slices
        tables = rope_tables(self.length, plan.model.head_dim, plan.model.rope_theta, device, dtype)
        cut = self.length // self.slices
        self.rotations = [layer.Rotation(k * cut, *(t[k * cut :][:cut] for t in tables)) for k in range(self.slices)]
        self.span = range(*plan.layers[index])
        self.bound: dict[int, Bound] = {}
        self.weights: dict[str, torch.Tensor] = {}
        self.reading: list[layer.Weights] = []
        self.main: list[layer.Weights] = []
        if parameters.gradients is not None:
            self.accumulate_in(parameters.gradients)
        if parameters.weights is not None:
            self.read(parameters.weights)
        self.kept: dict[int, Kept] = {}
        self.pasts: dict[int, list[Past]] = {}  # by microbatch, of every layer
        self.deferred: dict[int, list[Deferred]] = {}
        self.sums = torch.zeros(2, plan.batch.microbatches, dtype=torch.float64, device=device)
        self.loss_sums = self.sums[0]

    def accumulate_in(self, flat: torch.Tensor) -> None:
        """The whole gradients are in this buffer; where others use it too, or parts of it are summed elsewhere, they
        begin with zeros at the first W of a step."""
        self.whole, self.stale = flat, self.parameters.cut.parts > 1
        self.gradients, self.main = self._bound(flat)
        self.layers = list(zip(self.reading, self.main, strict=False))

    def read(self, flat: torch.Tensor) -> None:
        """The whole weights are in this buffer from here on."""
        self.weights, self.reading = self._bound(flat)
        self.layers = list(zip(self.reading, self.main, strict=False))

    def forget(self) -> None:
        """There are no weights to read."""
        self.weights, self.reading, self.layers = {}, [], []

    def _bound(self, flat: torch.Tensor) -> Bound:
        """Views of the few buffers there are, made once."""
        if flat.data_ptr() not in self.bound:
            views = self.parameters.views(flat)
            self.bound[flat.data_ptr()] = Bound(views, [layer.weights_of(views, i) for i in self.span])
        return self.bound[flat.data_ptr()]

    def begin(self, step: int) -> None:
        """Before the first F of a step. Sums of the step before may still be on their way to the other ranks."""
        self.loss_sums = self.sums[step % 2]
        self.loss_sums.zero_()

    def forward(
        self, piece: int, received: torch.Tensor | None, tokens: torch.Tensor | None, targets: torch.Tensor | None
    ) -> torch.Tensor | None:
        """F. `received` [T, H] is the stage before's result, `tokens` and `targets` [T] are for the first and last
        stage. Returns the residual stream [T, H], nothing on the last stage."""
        microbatch, number = divmod(piece, self.slices)
        if number == 0:
            self.pasts[microbatch] = [Past(self.length) for _ in self.layers]
        branch, stream, self.kept[piece], losses = self._through(piece, Given(received, tokens, targets), self.mode)
        if losses is None:
            return branch + stream
        self.loss_sums[microbatch].add_(losses.sum())
        return None

    def recompute(self, piece: int) -> None:
        """RECOMPUTE: makes what F did not keep. The losses have been counted."""
        kept = self.kept[piece]
        if self.mode == "full":
            self.kept[piece] = self._through(piece, kept.given, "none")[2]
        else:
            pairs = zip(self.layers, kept.roots, strict=True)
            kept.leaves.extend(layer.leaves(weights, self.model, roots) for (weights, _), roots in pairs)

    def backward_input(self, piece: int, dy: torch.Tensor | None) -> torch.Tensor | None:
        """B. `dy` [T, H] is the gradient of this stage's result, nothing on the last stage. Returns the gradient of
        what F received, nothing on the first stage."""
        microbatch, number = divmod(piece, self.slices)
        pasts = self.pasts[microbatch] if number else self.pasts.pop(microbatch)
        kept = self.kept.pop(piece)
        work: list[Deferred] = []
        if kept.ending is not None:
            dy, work = self._end_backward(kept.ending)
        assert dy is not None
        for (weights, gradients), past in zip(reversed(self.layers), reversed(pasts), strict=True):
            # popped, so that what W does not need is freed before the next layer needs memory
            rotation, roots, leaves = self.rotations[number], kept.roots, kept.leaves
            dy, more = layer.backward(weights, gradients, self.model, rotation, past, roots.pop(), leaves.pop(), dy)
            work += more
        tokens = kept.given.tokens
        if tokens is not None:
            work.append(Lookup(self.gradients["embedding"], dy, tokens))
        self.deferred[piece] = work
        return None if tokens is not None else dy

    def backward_weight(self, piece: int) -> None:
        """W."""
        if self.stale:
            self.whole.zero_()
            self.stale = False
        accumulate(self.deferred.pop(piece))

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
        self, piece: int, given: Given, mode: str
    ) -> tuple[torch.Tensor, torch.Tensor, Kept, torch.Tensor | None]:
        """One piece through all layers, and on the last stage through the head: (branch, stream, what `mode` keeps,
        losses [T])."""
        microbatch, number = divmod(piece, self.slices)
        kept, losses = Kept(given, [], [], None), None
        branch = self.weights["embedding"][given.tokens] if given.received is None else given.received
        stream: torch.Tensor | None = None
        for (weights, _), past in zip(self.layers, self.pasts[microbatch], strict=True):
            branch, stream, roots, leaves = layer.forward(
                weights, self.model, self.rotations[number], past, branch, stream, deterministic=self.deterministic
            )
            kept.roots.extend([roots] if mode != "full" else [])
            kept.leaves.extend([leaves] if mode == "none" else [])
            del roots, leaves  # what is not kept is free before the next layer needs memory
        assert stream is not None
        if given.targets is not None:
            ending, losses = self._end(branch, stream, given.targets)
            kept = kept if mode == "full" else kept._replace(ending=ending)
        return branch, stream, kept, losses

    def _end(self, branch: torch.Tensor, stream: torch.Tensor, targets: torch.Tensor) -> tuple[Ending, torch.Tensor]:
        normed, entry, scale = rms_norm(branch, self.weights["norm"], self.model.norm_eps, stream)
        logits = torch.mm(normed, self.weights["head"].t())
        losses, lse = cross_entropy(logits, targets)
        return Ending(entry, scale, normed, logits, lse, targets), losses

    def _end_backward(self, ending: Ending) -> tuple[torch.Tensor, list[Deferred]]:
        dlogits = ending.logits
        cross_entropy_backward_(dlogits, ending.targets, ending.lse, self.loss_scale)
        dnormed = torch.mm(dlogits, self.weights["head"])
        dstream, dnorm = rms_norm_backward(dnormed, ending.stream, self.weights["norm"], ending.scale, None)
        return dstream, [Product(self.gradients["head"], dlogits, ending.normed), Sum(self.gradients["norm"], dnorm)]


def _tensors(nested: object) -> Iterator[torch.Tensor]:
    if isinstance(nested, torch.Tensor):
        yield nested
    elif isinstance(nested, tuple | list):
        for each in nested:
            yield from _tensors(each)
