"""One pipeline stage: its layers, with the embedding at the front of the model and the head and loss at its end."""

from __future__ import annotations

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


class Kept(NamedTuple):
    """What a piece keeps between F and B."""

    tokens: torch.Tensor | None  # [T], first stage
    layers: list[layer.Saved]
    ending: Ending | None  # last stage


class Bound(NamedTuple):
    """Parts of a whole flat buffer: by name, and those of each layer."""

    views: dict[str, torch.Tensor]
    layers: list[layer.Weights]


class Stage:
    """Runs F, B and W of its layers; keeps activations from F to B and (x, dY) from B to W, by piece: a microbatch or,
    where sequences are cut, one of its slices. Those run in order forward and in reverse backward, T tokens each.

    `loss_sums` [microbatches], float64, are the sums of their tokens' losses, on the last stage; whoever reads them at
    the end of a step sets them to zero.
    """

    def __init__(self, plan: Plan, index: int, parameters: Parameters) -> None:
        self.model, self.index, self.parameters = plan.model, index, parameters
        self.first, self.last = index == 0, index == plan.program.stages - 1
        self.deterministic = plan.deterministic
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
        self.loss_sums = torch.zeros(plan.batch.microbatches, dtype=torch.float64, device=device)

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

    def forward(
        self, piece: int, received: torch.Tensor | None, tokens: torch.Tensor | None, targets: torch.Tensor | None
    ) -> torch.Tensor | None:
        """F. `received` [T, H] is the stage before's result, `tokens` and `targets` [T] are for the first and last
        stage. Returns the residual stream [T, H], nothing on the last stage."""
        microbatch, number = divmod(piece, self.slices)
        if number == 0:
            self.pasts[microbatch] = [Past(self.length) for _ in self.layers]
        branch = self.weights["embedding"][tokens] if received is None else received
        stream: torch.Tensor | None = None
        saved = []
        for (weights, _), past in zip(self.layers, self.pasts[microbatch], strict=True):
            branch, stream, kept = layer.forward(
                weights, self.model, self.rotations[number], past, branch, stream, deterministic=self.deterministic
            )
            saved.append(kept)
        ending = None
        if targets is not None:
            ending = self._end(microbatch, branch, stream, targets)
        self.kept[piece] = Kept(tokens if received is None else None, saved, ending)
        assert stream is not None
        return None if ending else branch + stream

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
            rotation = self.rotations[number]
            dy, more = layer.backward(weights, gradients, self.model, rotation, past, kept.layers.pop(), dy)
            work += more
        if kept.tokens is not None:
            work.append(Lookup(self.gradients["embedding"], dy, kept.tokens))
        self.deferred[piece] = work
        return None if kept.tokens is not None else dy

    def backward_weight(self, piece: int) -> None:
        """W."""
        if self.stale:
            self.whole.zero_()
            self.stale = False
        accumulate(self.deferred.pop(piece))

    def _end(self, microbatch: int, branch: torch.Tensor, stream: torch.Tensor | None, targets: torch.Tensor) -> Ending:
        normed, entry, scale = rms_norm(branch, self.weights["norm"], self.model.norm_eps, stream)
        logits = torch.mm(normed, self.weights["head"].t())
        losses, lse = cross_entropy(logits, targets)
        self.loss_sums[microbatch].add_(losses.sum())
        return Ending(entry, scale, normed, logits, lse, targets)

    def _end_backward(self, ending: Ending) -> tuple[torch.Tensor, list[Deferred]]:
        dlogits = ending.logits
        cross_entropy_backward_(dlogits, ending.targets, ending.lse, self.loss_scale)
        dnormed = torch.mm(dlogits, self.weights["head"])
        dstream, dnorm = rms_norm_backward(dnormed, ending.stream, self.weights["norm"], ending.scale, None)
        return dstream, [Product(self.gradients["head"], dlogits, ending.normed), Sum(self.gradients["norm"], dnorm)]
