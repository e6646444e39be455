"""Inspects a custom model before it runs: parameter shapes, FLOPs, activation bytes, and what cannot be trained.

Every layer runs once on fake tensors, which have no memory, so a model of any size takes seconds.
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

from pentad.schedules.generators.user_file import describe_error, read_source, user_error
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.spec.model import CustomLayer, CustomModel
from pentad.workers.custom.autograd import (
    DeferringMode,
    ParameterOwner,
    Tape,
    bind_parameters,
    graph_output,
    storage_id,
)
from pentad.workers.custom.loader import (
    MODEL,
    accepted_sizes,
    build_layers,
    call_function,
    cast_layer,
    make_layer,
    parameter_slots,
)

CPU = torch.device("cpu")
ROWS = 2  # sequences of the trial run


def _attention_flops(q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(q, k, v))


# Which torch does not count by itself.
FLOPS = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops}


def inspect_model(text: str, sizes: Mapping[str, int], dtype: torch.dtype) -> CustomModel:
    """The model that `text` = 'FILE.py:FUNCTION' makes of those sizes that its function has parameters for.

    The sizes 'vocab', 'hidden' and 'length' also determine the shapes of its results. Raises PentadError for what
    cannot be trained, naming the layer.
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
        parameters: dict[int, tuple[nn.Parameter, int]] = {}
        tokens = torch.zeros(ROWS, length, dtype=torch.int64)
        x, layers = tokens, []
        for number, item in enumerate(items):
            layer = make_layer(text, number, item)
            _require_trainable(text, number, layer, parameters)
            cast_layer(layer, dtype, CPU)
            y, flops, is_random = _run_layer(text, number, layer, x)
            last = number == len(items) - 1
            if not last or loss is None:
                expected = (ROWS, length, vocab if last else hidden)
                _require_result(text, number, y, expected, "model.vocab" if last else "model.hidden", dtype)
            tensors = tuple((name, tuple(map(int, p.shape))) for name, p in layer.named_parameters())
            layers.append(CustomLayer(tensors, flops // ROWS, is_random))
            x = y.detach()
        if loss is not None:
            _require_loss(text, loss, x, tokens)
    return CustomModel(text, source, length, sizes, tuple(layers))


class _RandomnessDetector(TorchDispatchMode):
    """`seen` becomes true when an operation draws random numbers."""

    seen = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen = self.seen or torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))


def _run_layer(text: str, number: int, layer: nn.Module, x: Tensor) -> tuple[Tensor, int, bool]:
    """(result, FLOPs, whether it draws random numbers); tries the backward too."""
    x = x.requires_grad_() if x.is_floating_point() else x
    buffers = {name: (buffer, buffer._version) for name, buffer in layer.named_buffers()}
    parameters = dict(layer.named_parameters())
    try:
        with (
            torch.enable_grad(),
            _RandomnessDetector() as random,
            FlopCounterMode(display=False, custom_mapping=FLOPS) as flops,
        ):
            y = layer(x)
        inputs = [*parameters.values(), *([x] if x.requires_grad else [])]
        grads: Any = [None] * len(parameters)
        if isinstance(y, Tensor) and y.requires_grad and inputs:
            grads = torch.autograd.grad(y, inputs, torch.zeros_like(y), allow_unused=True)
    except PentadError:
        raise
    except Exception as error:
        found = f"layer {number} ({type(layer).__name__}) raises {describe_error(text, error)} for {_shape(x)}"
        raise user_error(text, found, MODEL) from None
    if not isinstance(y, Tensor):
        raise _layer_error(text, number, layer, f"returns a {type(y).__name__}: expected a tensor")
    unused = [name for name, gradient in zip(parameters, grads, strict=False) if gradient is None]
    if unused:
        said = f"has a parameter {unused[0]!r} that its result does not depend on: expected none"
        raise _layer_error(text, number, layer, said)
    changed = [name for name, (buffer, version) in buffers.items() if buffer._version != version]
    if changed:
        said = f"changes its buffer {changed[0]!r} in forward: expected a constant one"
        raise _layer_error(text, number, layer, said)
    return y, int(flops.get_total_flops()), random.seen


def _require_trainable(
    text: str, number: int, layer: nn.Module, parameters: dict[int, tuple[nn.Parameter, int]]
) -> None:
    """Adds to `parameters`, which holds those of earlier layers by id, with the number of the layer."""
    persistent = layer.state_dict(keep_vars=True)
    for name, parameter in layer.named_parameters():
        if not parameter.is_floating_point():
            dtype = str(parameter.dtype).removeprefix("torch.")
            raise _layer_error(text, number, layer, f"has a parameter {name!r} of {dtype}: expected floating point")
        if not parameter.requires_grad:
            raise _layer_error(text, number, layer, f"has a parameter {name!r} without requires_grad: expected none")
        if id(parameter) in parameters:
            other = parameters[id(parameter)][1]
            said = f"shares its parameter {name!r} with layer {other}: expected layers that share nothing"
            raise _layer_error(text, number, layer, said)
        parameters[id(parameter)] = parameter, number
    for name, _ in layer.named_buffers():
        if name in persistent:
            said = f"has a persistent buffer {name!r}: expected only constant ones (persistent=False)"
            raise _layer_error(text, number, layer, said)


def _require_result(
    text: str, number: int, y: Tensor, expected: tuple[int, ...], width: str, dtype: torch.dtype
) -> None:
    if tuple(y.shape) != expected:
        said = f"layer {number} returns {_shape(y)}: expected {list(expected)} (rows, batch.sequence_length, {width})"
        raise user_error(text, said, MODEL)
    if y.dtype != dtype:
        found, compute = (str(each).removeprefix("torch.") for each in (y.dtype, dtype))
        raise user_error(text, f"layer {number} returns {found}: expected the compute dtype, {compute}", MODEL)


def _require_loss(text: str, loss: Callable[[Tensor, Tensor], Tensor], x: Tensor, targets: Tensor) -> None:
    try:
        result: Any = loss(x, targets)
    except Exception as error:
        raise user_error(text, f"its loss raises {describe_error(text, error)} for {_shape(x)}", MODEL) from None
    if not isinstance(result, Tensor) or result.shape != targets.shape:
        found = _shape(result) if isinstance(result, Tensor) else f"a {type(result).__name__}"
        raise user_error(text, f"its loss returns {found}: expected one loss a token, {list(targets.shape)}", MODEL)


def _layer_error(text: str, number: int, layer: nn.Module, said: str) -> PentadError:
    return user_error(text, f"layer {number} ({type(layer).__name__}) {said}", MODEL)


def _shape(tensor: Tensor) -> str:
    return str(list(tensor.shape))


class ActivationBytes(NamedTuple):
    """Bytes of one microbatch on a stage."""

    saved: int  # by F, besides what it received
    offloadable: int  # of these
    layer: int  # the most that one layer saves
    deferred: int  # what B leaves to W


@lru_cache(256)
def activation_bytes(
    model: CustomModel, first: int, end: int, hidden: int, rows: int, dtype: torch.dtype
) -> ActivationBytes:
    """Runs F and B of layers `first` to `end` on fake tensors.

    Counts what CPU kernels save; GPU kernels may save other statistics of attention and norms.
    """
    last = end == len(model.layers)
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    with FakeTensorMode(allow_non_fake_inputs=True):
        layers, loss = build_layers(model, 0, first, end)
        owner = _bind_fake(model, layers, first, dtype, wide)
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
        offloadable = [tensor for tensor in saved if tensor.is_floating_point() and tensor.dim() > 1]
        tape.backward(received, graph_output(x), torch.zeros_like(x))
        deferred = [
            value
            for item in tape.work
            for name, value in item._asdict().items()
            if name != "gradient" and isinstance(value, Tensor)
        ]
        return ActivationBytes(
            saved=_storage_bytes([*saved, *losses], received_storage),
            offloadable=_storage_bytes(offloadable, received_storage | {storage_id(x)}),
            layer=max(by_layer, default=0),
            deferred=_storage_bytes(deferred, set()),
        )


def _bind_fake(
    model: CustomModel, layers: list[nn.Module], first: int, dtype: torch.dtype, wide: torch.dtype
) -> ParameterOwner:
    """Gives the layers fake parameters that are views of one buffer, as on a rank."""
    shapes = {
        f"layers.{number}.{name}": shape
        for number in range(first, first + len(layers))
        for name, shape in model.layers[number].tensors
    }
    owner = ParameterOwner()
    owner.bound = bind_parameters(_views(shapes, dtype), _views(shapes, wide), owner, Tensor)
    slots = [
        (f"layers.{number}.{name}", slot)
        for number, layer in enumerate(layers, first)
        for name, slots in parameter_slots(layer).items()
        for slot in slots
    ]
    for layer in layers:
        cast_layer(layer, dtype, CPU)
    for name, (module, attribute) in slots:
        module._parameters[attribute] = owner.bound.leaves[name]  # type: ignore[assignment]
    return owner


def _views(shapes: dict[str, tuple[int, ...]], dtype: torch.dtype) -> dict[str, Tensor]:
    flat = torch.zeros(sum(map(math.prod, shapes.values())), dtype=dtype)
    parts = flat.split([math.prod(shape) for shape in shapes.values()])
    return {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}


def _storage_bytes(tensors: list[Tensor], excluded: set[int]) -> int:
    """Of all distinct storages."""
    sizes = {storage_id(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(size for storage, size in sizes.items() if storage not in excluded)
