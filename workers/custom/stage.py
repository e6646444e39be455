"""One pipeline stage of a custom model: the user's torch modules and, in the last stage, the loss."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from pentad.kernels.backend import IGNORE_INDEX, deterministic_algorithms
from pentad.kernels.cross_entropy import cross_entropy, cross_entropy_backward_
from pentad.schedules.generators.user_file import describe_error
from pentad.schedules.spec.plan import Plan
from pentad.workers.custom.autograd import (
    BoundParameters,
    GraphOutput,
    ParameterOwner,
    Tape,
    bind_parameters,
    copy_from,
    graph_output,
)
from pentad.workers.custom.loader import build_layers, cast_layer, model_error, parameter_slots, set_parameters
from pentad.workers.linear.weight_grad import Params
from pentad.workers.model.base_stage import BaseStage, StageInputs, activation_storages, storage_id
from pentad.workers.parallel.async_ops import Task
from pentad.workers.params.param_buffers import ParamBuffers
from pentad.workers.params.param_init import derive_seed

# Flash attention takes 16-bit dtypes; everything else uses plain GEMMs, which always add in the same order.
DETERMINISTIC_ATTENTION = [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]


class CustomSaved(NamedTuple):
    """What is saved between F and B. With recomputation, only the inputs are there until RECOMPUTE."""

    inputs: tuple[Tensor | None, Tensor | None, Tensor | None]  # received, tokens, targets
    tape: Tape | None = None
    x: Tensor | None = None  # the first layer's input
    output: GraphOutput | None = None  # the last layer's, or the user's loss's
    sent_storage: int = 0  # the result's, which a transfer reads: offloading must not touch it
    logits: Tensor | None = None
    lse: Tensor | None = None


class CustomStage(BaseStage, ParameterOwner):
    """A stage of torch modules with autograd. Its W does not proceed by layers, so no gradient is complete before the
    end of W.

    Layers map [rows, S, H] to the same shape; the model's first layer reads tokens [rows, S], and its last one returns
    logits [rows, S, V] or whatever the user's loss takes. Random numbers depend only on seed, step, microbatch and
    layer.
    """

    bound: BoundParameters

    def __init__(self, plan: Plan, index: int, param_buffers: list[ParamBuffers], rank: int = 0) -> None:
        super().__init__(plan, index, param_buffers)
        assert plan.model.custom is not None
        self.custom, self.step = plan.model.custom, 0
        self.dp_rank = self.draws_as = plan.mesh.coordinates(rank).dp  # draws the random numbers of dp rank `draws_as`
        self.layers, self.loss = build_layers(self.custom, plan.seed, *plan.layers[index][:2])
        self.slots = parameter_slots(self.layers, self.layer_numbers.start)
        # Frees the modules' own values: the parameters are in the flat buffers.
        set_parameters(self.slots, dict.fromkeys(self.slots, nn.Parameter(torch.empty(0))))
        for layer in self.layers:
            cast_layer(layer, param_buffers[0].parameters.compute.dtype, self.device)
        self.bind()

    def bind(self) -> None:
        super().bind()
        set_parameters(self.slots, self.bound.leaves)

    def _bind(self, params: Params) -> BoundParameters:
        return bind_parameters(params, self)

    def begin(self, step: int, microbatches: int, target_tokens: int) -> None:
        super().begin(step, microbatches, target_tokens)
        self.step = step

    @contextmanager
    def replaying(self, step: int) -> Iterator[None]:
        with super().replaying(step):
            self.draws_as = 0
            yield
        self.draws_as = self.dp_rank

    def forward(self, slice_index: int, inputs: StageInputs) -> Task[Tensor | None]:
        yield from ()  # layers need no communication
        received, targets = _received(inputs), inputs.targets
        saved = CustomSaved((received, inputs.tokens, targets))
        if self.recompute_mode == "full":
            with torch.no_grad():
                result, losses, _ = self._run_layers(slice_index, self._input(saved), targets)
        else:
            result, losses, saved = self._record(slice_index, saved)
        self.saved[slice_index] = saved
        if losses is None:
            return _output(result, received)
        self.loss_sums[slice_index].add_(losses.detach().view(self.loss_sums.shape[1], -1).sum(1))
        return None

    def evaluate(self, slice_index: int, inputs: StageInputs) -> Task[Tensor | None]:
        """Runs the layers with the modules in evaluation mode: without dropout, for example."""
        yield from ()
        received, targets = _received(inputs), inputs.targets
        known = targets if targets is None or self.loss is None else targets.clamp(min=0)  # as in training
        with torch.no_grad(), _evaluation_mode([*self.layers, self.loss]):
            x = self._input(CustomSaved((received, inputs.tokens, None)))
            result, losses, _ = self._run_layers(slice_index, x, known, step=-1)
        if losses is None or targets is None:
            return _output(result, received)
        masked = losses.flatten().masked_fill(targets < 0, 0)
        self.loss_sums[slice_index].add_(masked.view(self.loss_sums.shape[1], -1).sum(1))
        return None

    def recompute(self, slice_index: int) -> None:
        self.saved[slice_index] = self._record(slice_index, self.saved[slice_index])[2]

    def backward_input(self, slice_index: int, dy: Tensor | None) -> Task[Tensor | None]:
        yield from ()
        saved: CustomSaved = self.saved.pop(slice_index)
        tape, output = saved.tape, saved.output
        assert tape is not None and output is not None
        transfers = {storage_id(t) for t in (saved.inputs[0], dy) if t is not None}
        if saved.logits is not None:
            dy = self._loss_backward(saved, saved.logits, tape)
        elif self.last:
            dy = torch.full(output.shape, self.layer_context.loss_scale, dtype=output.dtype, device=self.device)
        assert dy is not None
        x = None if self.first else saved.x
        del saved
        with self._deterministic():
            dx = tape.backward(x, output, dy)
        self.deferred[slice_index] = [copy_from(transfers, item) for item in tape.work]
        return None if dx is None else dx.reshape(-1, dx.shape[-1])

    def offloadable(self, slice_index: int) -> list[torch.UntypedStorage]:
        saved: CustomSaved = self.saved[slice_index]
        excluded = {saved.sent_storage, *(storage_id(t) for t in (*saved.inputs, saved.logits) if t is not None)}
        return activation_storages(saved.tape.saved if saved.tape is not None else [], excluded)

    def _input(self, saved: CustomSaved) -> Tensor:
        """The first layer's input: [rows, S] or [rows, S, H]."""
        received, tokens, _ = saved.inputs
        x = tokens if received is None else received.detach()
        assert x is not None
        return x.view(-1, self.plan.batch.sequence_length, *x.shape[1:])

    def _record(self, slice_index: int, saved: CustomSaved) -> tuple[Tensor, Tensor | None, CustomSaved]:
        """(result, losses, what B needs) of a forward that records an autograd graph."""
        tape, x = Tape(self), self._input(saved)
        x = x if self.first else x.requires_grad_()
        with tape.recording():
            result, losses, lse = self._run_layers(slice_index, x, saved.inputs[2])
        saved = saved._replace(
            tape=tape,
            x=x,
            output=graph_output(losses if losses is not None and lse is None else result),
            sent_storage=0 if self.last else storage_id(result),
            logits=None if lse is None else result.detach(),
            lse=lse,
        )
        return result.detach(), losses, saved

    def _run_layers(
        self, slice_index: int, x: Tensor, targets: Tensor | None, step: int | None = None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """(result of the last layer, losses, log-sum-exp of the logits unless the loss is the user's). Random numbers
        are those of `step` (None: the present one)."""
        step = self.step if step is None else step
        microbatch = self.draws_as * self.microbatches + slice_index
        with self._deterministic():
            for number, layer in zip(self.layer_numbers, self.layers, strict=True):
                if self.custom.layers[number].is_random:
                    self._seed(derive_seed(self.plan.seed, "draw", step, microbatch, number))
                x = self._call(f"layer {number}", layer, x)
            if targets is None:
                return x, None, None
            if self.loss is not None:
                targets = targets.view(x.shape[0], -1)
                losses = self._call("the loss", self.loss, x, targets)
                return x, losses.masked_fill(targets == IGNORE_INDEX, 0.0), None
        losses, lse = cross_entropy(x.detach().reshape(-1, x.shape[-1]), targets)
        return x, losses, lse

    def _call(self, name: str, function: Callable[..., Tensor], *args: Tensor) -> Tensor:
        try:
            return function(*args)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            raise model_error(self.custom.text, f"{name} raises {describe_error(self.custom.text, error)}") from None

    def _loss_backward(self, saved: CustomSaved, logits: Tensor, tape: Tape) -> Tensor:
        """The gradient of the logits, in place unless B still reads them."""
        is_read = any(storage_id(logits) == storage_id(tensor) for tensor in tape.saved)
        logits = logits.reshape(-1, logits.shape[-1])
        logits = logits.clone() if is_read else logits
        targets, lse = saved.inputs[2], saved.lse
        assert targets is not None and lse is not None
        cross_entropy_backward_(logits, targets, lse, self.layer_context.loss_scale)
        return logits

    def _seed(self, seed: int) -> None:
        torch.default_generator.manual_seed(seed)
        if self.device.type == "cuda":
            torch.cuda.default_generators[self.device.index or 0].manual_seed(seed)

    @contextmanager
    def _deterministic(self) -> Iterator[None]:
        """Asks torch for deterministic algorithms on a GPU; where an operation has none, torch warns."""
        if not self.layer_context.deterministic or self.device.type != "cuda":
            yield
            return
        with deterministic_algorithms("warn"), sdpa_kernel(DETERMINISTIC_ATTENTION, set_priority=True):
            yield


def _received(inputs: StageInputs) -> Tensor | None:
    """The tensor that a stage receives; just one, because custom models are not cut within layers."""
    assert not isinstance(inputs.received, tuple)
    return inputs.received


def _output(result: Tensor, received: Tensor | None) -> Tensor:
    """A layer's result as F returns it: [T, H], not in the transport's memory."""
    result = result.detach().reshape(-1, result.shape[-1])
    return result.clone() if received is not None and storage_id(result) == storage_id(received) else result


@contextmanager
def _evaluation_mode(layers: Iterable[object]) -> Iterator[None]:
    modules = [module for layer in layers if isinstance(layer, nn.Module) for module in layer.modules()]
    training = [module for module in modules if module.training]
    try:
        for module in training:
            module.training = False
        yield
    finally:
        for module in training:
            module.training = True
