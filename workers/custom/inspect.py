"""Inspects a custom model before it runs: parameter shapes, FLOPs, activation bytes, and whether it can be trained.

Every layer runs once on fake tensors, which need no memory, so this takes seconds for a model of any size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from pentad.schedules.generators.user_file import describe_error, read_source
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.spec.model import CustomLayer, CustomModel
from pentad.workers.custom.autograd import DeferringMode, ParameterOwner, Tape, bind_parameters, graph_output, operands
from pentad.workers.custom.loader import (
    MODEL,
    accepted_sizes,
    build_layers,
    call_function,
    cast_layer,
    make_layer,
    model_error,
    named_parameters,
    parameter_slots,
    set_parameters,
)
from pentad.workers.linear.weight_grad import Param
from pentad.workers.model.base_stage import activation_storages, storage_id

CPU = torch.device("cpu")
ROWS = 2  # sequences in the trial run


def _attention_flops(q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
    """FLOPs of attention for shapes [batch, heads, length, width]. Grouped key and value heads count as often as they
    are read; torch 2.11's own formula does not accept them."""
    return int(sdpa_flop_count(q, *((shape[0], q[1], *shape[2:]) for shape in (k, v))))


# Operations that torch does not count by itself.
FLOPS = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops}


def inspect_model(text: str, sizes: Mapping[str, int], dtype: torch.dtype) -> CustomModel:
    """The model that `text` = 'FILE.py:FUNCTION' makes from those of the `sizes` for which the function has parameters.

    The sizes 'vocab', 'hidden' and 'length' also determine the shapes of its results. Raises PentadError, naming the
    layer, if the model cannot be trained.
    """
    source = read_source(text, MODEL)
    accepted = accepted_sizes(text, source, sizes)
    return _inspect(text, source, accepted, sizes["vocab"], sizes["hidden"], sizes["length"], dtype)


@lru_cache(16)
def _inspect(
    text: str, source: str, sizes: tuple[tuple[str, int], ...], vocab: int, hidden: int, length: int, dtype: torch.dtype
) -> CustomModel:
    with FakeTensorMode(allow_non_fake_inputs=True):
        items, loss = call_function(text, source, sizes)
        seen: dict[int, tuple[nn.Parameter, int]] = {}
        tokens = torch.zeros(ROWS, length, dtype=torch.int64)
        x, layers = tokens, []
        for number, item in enumerate(items):
            trial = _Trial(text, number, make_layer(text, number, item))
            trial.require_trainable(seen)
            cast_layer(trial.layer, dtype, CPU)
            y, flops, is_random = trial.run(x)
            last = number == len(items) - 1
            if not last or loss is None:
                width, key = (vocab, "model.vocab") if last else (hidden, "model.hidden")
                trial.require_result(y, (ROWS, length, width), key, dtype)
            tensors = tuple((name, tuple(map(int, p.shape))) for name, p in trial.layer.named_parameters())
            layers.append(CustomLayer(tensors, flops // ROWS, is_random))
            x = y.detach()
        if loss is not None:
            _require_loss(text, loss, x, tokens)
    return CustomModel(text, source, length, sizes, tuple(layers))


class _RandomnessDetector(TorchDispatchMode):
    """Sets `seen` when an operation draws random numbers."""

    seen = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen = self.seen or torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))


class _Trial(NamedTuple):
    """The trial run of layer `number` of the model named by `text`."""

    text: str
    number: int
    layer: nn.Module

    def error(self, found: str) -> PentadError:
        return model_error(self.text, f"layer {self.number} ({type(self.layer).__name__}) {found}")

    def require_trainable(self, seen: dict[int, tuple[nn.Parameter, int]]) -> None:
        """Raises PentadError for parameters or buffers that cannot be trained. Adds the parameters to `seen`, which has
        those of earlier layers by id, with the layer's number."""
        for name, parameter in self.layer.named_parameters():
            if not parameter.is_floating_point():
                raise self.error(f"has a parameter {name!r} of {_dtype(parameter.dtype)}: expected floating point")
            if not parameter.requires_grad:
                raise self.error(f"has a parameter {name!r} without requires_grad: expected none")
            if id(parameter) in seen:
                found = f"shares its parameter {name!r} with layer {seen[id(parameter)][1]}"
                raise self.error(f"{found}: expected layers that share nothing")
            seen[id(parameter)] = parameter, self.number
        persistent = self.layer.state_dict(keep_vars=True)
        for name, _ in self.layer.named_buffers():
            if name in persistent:
                raise self.error(f"has a persistent buffer {name!r}: expected only constant ones (persistent=False)")

    def run(self, x: Tensor) -> tuple[Tensor, int, bool]:
        """(result, FLOPs, whether it draws random numbers) of the forward; also tries the backward. Raises PentadError
        if the layer fails."""
        x = x.requires_grad_() if x.is_floating_point() else x
        buffers = {name: (buffer, buffer._version) for name, buffer in self.layer.named_buffers()}
        parameters = dict(self.layer.named_parameters())
        try:
            with (
                torch.enable_grad(),
                _RandomnessDetector() as random,
                FlopCounterMode(display=False, custom_mapping=FLOPS) as flops,
            ):
                y = self.layer(x)
            inputs = [*parameters.values(), *([x] if x.requires_grad else [])]
            grads: Any = [None] * len(parameters)
            if isinstance(y, Tensor) and y.requires_grad and inputs:
                grads = torch.autograd.grad(y, inputs, torch.zeros_like(y), allow_unused=True)
        except PentadError:
            raise
        except Exception as error:
            raise self.error(f"raises {describe_error(self.text, error)} for {_shape(x)}") from None
        if not isinstance(y, Tensor):
            raise self.error(f"returns a {type(y).__name__}: expected a tensor")
        for name, gradient in zip(parameters, grads, strict=False):
            if gradient is None:
                raise self.error(f"has a parameter {name!r} that its result does not depend on: expected none")
        for name, (buffer, version) in buffers.items():
            if buffer._version != version:
                raise self.error(f"changes its buffer {name!r} in forward: expected a constant one")
        return y, int(flops.get_total_flops()), random.seen

    def require_result(self, y: Tensor, shape: tuple[int, ...], width: str, dtype: torch.dtype) -> None:
        """Raises PentadError unless a result has this shape and dtype; `width` is the config key of the last
        dimension."""
        found = f"layer {self.number} returns"
        if tuple(y.shape) != shape:
            expected = f"{list(shape)} (rows, batch.sequence_length, {width})"
            raise model_error(self.text, f"{found} {_shape(y)}: expected {expected}")
        if y.dtype != dtype:
            expected = f"the compute dtype, {_dtype(dtype)}"
            raise model_error(self.text, f"{found} {_dtype(y.dtype)}: expected {expected}")


def _require_loss(text: str, loss: Callable[[Tensor, Tensor], Tensor], x: Tensor, targets: Tensor) -> None:
    try:
        result: Any = loss(x, targets)
    except Exception as error:
        raise model_error(text, f"its loss raises {describe_error(text, error)} for {_shape(x)}") from None
    if not isinstance(result, Tensor) or result.shape != targets.shape:
        found = _shape(result) if isinstance(result, Tensor) else f"a {type(result).__name__}"
        raise model_error(text, f"its loss returns {found}: expected one loss a token, {_shape(targets)}")


def _shape(tensor: Tensor) -> str:
    return str(list(tensor.shape))


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class ActivationBytes(NamedTuple):
    """Bytes of one microbatch on a stage."""

    saved: int  # by F, besides what it received
    offloadable: tuple[int, ...]  # part of the saved bytes, by storage
    layer: int  # the most that one layer saves
    deferred: int  # operands that B leaves to W


@lru_cache(256)
def activation_bytes(
    model: CustomModel, first: int, end: int, hidden: int, rows: int, dtype: torch.dtype
) -> ActivationBytes:
    """Measured by running F and B of layers `first` to `end` on fake tensors.

    Counts what CPU kernels save; GPU kernels may save other statistics for attention and norms.
    """
    last = end == len(model.layers)
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    with FakeTensorMode(allow_non_fake_inputs=True):
        layers, loss = build_layers(model, 0, first, end)
        owner = _bind_fake(layers, first, dtype, wide)
        tokens = torch.zeros(rows, model.length, dtype=torch.int64)
        received = None if first == 0 else torch.zeros(rows, model.length, hidden, dtype=dtype, requires_grad=True)
        tape, x, ends = Tape(owner), tokens if received is None else received, [0]
        with tape.recording(), DeferringMode():
            for layer in layers:
                x = layer(x)
                ends.append(len(tape.saved))
            if last and loss is not None:
                x = loss(x, tokens)
        losses = [x, torch.zeros(rows, model.length, dtype=wide)] if last else []
        received_storage = set() if received is None else {storage_id(received)}
        saved = list(tape.saved)
        by_layer = [_storage_bytes(saved[start:stop], received_storage) for start, stop in pairwise(ends)]
        offloadable = activation_storages(saved, received_storage | {storage_id(x)})
        tape.backward(received, graph_output(x), torch.zeros_like(x))
        deferred = [x for item in tape.work for x in operands(item).values()]
        return ActivationBytes(
            saved=_storage_bytes([*saved, *losses], received_storage),
            offloadable=tuple(storage.nbytes() for storage in offloadable),
            layer=max(by_layer, default=0),
            deferred=_storage_bytes(deferred, set()),
        )


def _bind_fake(layers: list[nn.Module], first: int, dtype: torch.dtype, wide: torch.dtype) -> ParameterOwner:
    """Gives the layers fake parameters that are views of one buffer, as on a rank."""
    slots, owner = parameter_slots(layers, first), ParameterOwner()
    shapes = {name: parameter.shape for name, parameter in named_parameters(layers, first)}
    for layer in layers:
        cast_layer(layer, dtype, CPU)
    weights, gradients = _views(shapes, dtype), _views(shapes, wide)
    params = {name: Param(weight, gradients[name]) for name, weight in weights.items()}
    owner.bound = bind_parameters(params, owner, fake=True)
    set_parameters(slots, owner.bound.leaves)
    return owner


def _views(shapes: dict[str, torch.Size], dtype: torch.dtype) -> dict[str, Tensor]:
    parts = torch.zeros(sum(map(math.prod, shapes.values())), dtype=dtype).split([*map(math.prod, shapes.values())])
    return {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}


def _storage_bytes(tensors: list[Tensor], excluded: set[int]) -> int:
    """The bytes of all distinct storages of these tensors that are not `excluded`."""
    sizes = {storage_id(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(size for storage, size in sizes.items() if storage not in excluded)
