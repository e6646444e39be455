"""One pipeline stage of a model of the user's own: its layers, and the loss at the model's end."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pentad.kernels.cross_entropy import cross_entropy, cross_entropy_backward_
from pentad.schedules.generators.custom_file import mistake, raised
from pentad.schedules.spec.plan import Plan
from pentad.workers.custom.autograd import Bound, End, Owner, Tape, bound, end_of, storage_of, without
from pentad.workers.custom.loader import MODEL, build, homes, key, narrow
from pentad.workers.custom.reproducible import reproducible
from pentad.workers.model.layer_context import Around
from pentad.workers.model.weight_grad import Deferred, accumulate
from pentad.workers.parallel.async_ops import Turns
from pentad.workers.parallel.process_groups import Inner
from pentad.workers.params.param_buffers import ParamBuffers


class Kept(NamedTuple):
    """Of a piece from F to B; `tape` is missing until RECOMPUTE where F kept no more than it got. `x` is what the first
    layer read; B goes from `end`: of the last layer's result, of logits or of the user's loss. Memory that `goes` is
    that of the result: it is on its way to the next stage, and this one's only where B reads it."""

    given: tuple[Tensor | None, Tensor | None, Tensor | None]  # received, tokens, targets
    tape: Tape | None = None
    x: Tensor | None = None
    end: End | None = None
    goes: int = 0
    logits: Tensor | None = None
    lse: Tensor | None = None


class CustomStage(Owner):
    """F, B and W of layers that are torch modules (see stage_protocol.py).

    They read [rows, S, H] and give the same; the first one gets tokens [rows, S], and the last one gives logits
    [rows, S, V], or what the user's loss takes. Random numbers depend on seed, step, microbatch and layer alone.
    """

    def __init__(self, plan: Plan, index: int, banks: list[ParamBuffers], rank: int = 0) -> None:
        assert plan.model.custom is not None
        self.plan, self.index, self.banks, self.own = plan, index, banks, plan.model.custom
        self.first, self.last = index == 0, index == plan.program.stages - 1
        self.mode, self.balance, self.is_alone = plan.mode(index), None, True
        self.around = Around(plan.model, plan.deterministic, 1.0 / plan.batch.tokens)
        master = banks[0].parameters.master
        self.dtype, self.device = banks[0].parameters.compute.dtype, master.device
        self.span = range(*plan.layers[index])
        layers, self.loss = build(self.own, plan.seed, *plan.layers[index])
        self.homes: dict[str, list[tuple[nn.Module, str]]] = {}
        for number, layer in zip(self.span, layers, strict=True):
            self.homes |= {f"layers.{number}.{name}": places for name, places in homes(layer).items()}
        for module, name in chain(*self.homes.values()):  # their values are in the bank
            module._parameters[name] = nn.Parameter(torch.empty(0))
        for layer in layers:
            narrow(layer, self.dtype, self.device)
        self.layers = layers
        at = plan.mesh.coordinates(rank)
        self.replica = at.dp * plan.mesh.ep + at.ep
        self.bound: dict[tuple[int, ...], Bound] = {(): Bound({}, {}, {}, 0, 0)}
        self.bind()
        self.kept: dict[int, Kept] = {}
        self.deferred: dict[int, list[Deferred]] = {}
        self.step, self.reached = 0, plan.model.layers + 1  # a W is in no order of layers
        self.sums = torch.zeros(2, plan.batch.microbatches, dtype=torch.float64, device=self.device)
        self.loss_sums = self.sums[0]

    def join(self, inner: Inner) -> None:
        self.around = self.around._replace(**inner._asdict())

    def bind(self) -> None:
        bank = self.banks[0]
        at = (id(bank.weights), id(bank.gradients)) if bank.weights and bank.gradients else ()
        if at not in self.bound:
            self.bound[at] = bound(bank.weights, bank.gradients, self)
        self.now = self.bound[at]
        for name, leaf in self.now.leaves.items():
            for module, own in self.homes[name]:
                module._parameters[own] = leaf  # type: ignore[assignment]

    def begin(self, step: int) -> None:
        self.step, self.loss_sums = step, self.sums[step % 2]
        self.loss_sums.zero_()
        for bank in self.banks:
            bank.stale = True

    def forward(
        self,
        piece: int,
        received: Tensor | None,
        tokens: Tensor | None,
        targets: Tensor | None,
        further: Tensor | None = None,
        starts: Sequence[Sequence[int]] = (),
    ) -> Turns[Tensor | None]:
        """F."""
        yield from ()  # no other rank shares a layer
        kept = Kept((received, tokens, targets))
        if self.mode == "full":
            with torch.no_grad():
                result, losses, _ = self._through(piece, self._input(kept), targets)
        else:
            result, losses, kept = self._recorded(piece, kept)
        self.kept[piece] = kept
        if losses is None:
            result = result.detach().reshape(-1, result.shape[-1])
            return result.clone() if received is not None and storage_of(result) == storage_of(received) else result
        self.loss_sums[piece].add_(losses.detach().sum())
        return None

    def recompute(self, piece: int) -> None:
        """RECOMPUTE."""
        self.kept[piece] = self._recorded(piece, self.kept[piece])[2]

    def backward_input(self, piece: int, dy: Tensor | None) -> Turns[Tensor | None]:
        """B."""
        yield from ()
        kept = self.kept.pop(piece)
        tape, end = kept.tape, kept.end
        assert tape is not None and end is not None
        slots = {storage_of(t) for t in (kept.given[0], dy) if t is not None}
        if kept.logits is not None:
            dy = self._logits_backward(kept, kept.logits, tape)
        elif self.last:
            dy = torch.full(end.shape, self.around.loss_scale, dtype=end.dtype, device=self.device)
        assert dy is not None
        x = None if self.first else kept.x
        del kept
        with self._reproducible():
            dx = tape.backward(x, end, dy)
        self.deferred[piece] = [without(slots, item) for item in tape.work]
        return None if dx is None else dx.reshape(-1, dx.shape[-1])

    def backward_weight(self, piece: int) -> None:
        """W."""
        for bank in self.banks:
            bank.freshen()
        accumulate(self.deferred.pop(piece, []))

    def movable(self, piece: int) -> list[torch.UntypedStorage]:
        kept = self.kept[piece]
        stays = {kept.goes, *(storage_of(t) for t in (*kept.given, kept.logits) if t is not None)}
        saved = kept.tape.saved if kept.tape is not None else []
        found = (tensor for tensor in saved if tensor.is_floating_point() and tensor.dim() > 1)
        storages = {storage_of(tensor): tensor.untyped_storage() for tensor in found}
        return [storage for at, storage in storages.items() if at not in stays]

    def _input(self, kept: Kept) -> Tensor:
        received, tokens, _ = kept.given
        given = tokens if received is None else received.detach()
        assert given is not None
        return given.view(-1, self.plan.batch.length, *given.shape[1:])

    def _recorded(self, piece: int, kept: Kept) -> tuple[Tensor, Tensor | None, Kept]:
        tape, x = Tape(self), self._input(kept)
        x = x if self.first else x.requires_grad_()
        with tape.recording():
            result, losses, lse = self._through(piece, x, kept.given[2])
        end = end_of(losses if losses is not None and lse is None else result)
        logits = None if lse is None else result.detach()
        kept = kept._replace(
            tape=tape, x=x, end=end, goes=0 if self.last else storage_of(result), logits=logits, lse=lse
        )
        return result.detach(), losses, kept

    def _through(self, piece: int, x: Tensor, targets: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """(result of the last layer, losses, and their logarithms where the loss is not the user's)."""
        microbatch = self.replica * self.plan.batch.microbatches + piece
        with self._reproducible():
            for number, layer in zip(self.span, self.layers, strict=True):
                if self.own.layers[number].is_random:
                    self._seed(key(self.plan.seed, "draw", self.step, microbatch, number))
                x = self._called(f"layer {number}", layer, x)
            if targets is None:
                return x, None, None
            if self.loss is not None:
                return x, self._called("the loss", self.loss, x, targets.view(x.shape[0], -1)), None
        losses, lse = cross_entropy(x.detach().reshape(-1, x.shape[-1]), targets)
        return x, losses, lse

    def _called(self, who: str, function: nn.Module | object, *given: Tensor) -> Tensor:
        assert callable(function)
        try:
            made: Tensor = function(*given)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            raise mistake(self.own.text, f"{who} raises {raised(self.own.text, error)}", MODEL) from None
        return made

    def _logits_backward(self, kept: Kept, logits: Tensor, tape: Tape) -> Tensor:
        """Their gradient, in their place where no other part of B reads them."""
        read = any(storage_of(logits) == storage_of(saved) for saved in tape.saved)
        logits = logits.reshape(-1, logits.shape[-1])
        logits = logits.clone() if read else logits
        targets, lse = kept.given[2], kept.lse
        assert targets is not None and lse is not None
        cross_entropy_backward_(logits, targets, lse, self.around.loss_scale)
        return logits

    def _seed(self, number: int) -> None:
        torch.default_generator.manual_seed(number)
        if self.device.type == "cuda":
            torch.cuda.default_generators[self.device.index or 0].manual_seed(number)

    def _reproducible(self) -> AbstractContextManager[None]:
        return reproducible() if self.around.deterministic and self.device.type == "cuda" else nullcontext()
