"""Loads a custom model: the list of layers that the function in the user's file returns.

A layer is a torch.nn.Module, or a function without parameters that makes one, called only where the layer is held.
"""

from __future__ import annotations

import hashlib
import inspect
import reprlib
import sys
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from typing import Any, NamedTuple

import torch
from torch import nn

from pentad.schedules.generators.user_file import FunctionKind, describe_error, load_function, user_error
from pentad.schedules.spec.model import CustomModel

MODEL = FunctionKind("model", "(vocab, hidden, layers, ...)", "my.py:my_model")
EXPECTED = "a list of at least one torch.nn.Module, or such a list and a loss"

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
ParameterSlots = dict[str, list[tuple[nn.Module, str]]]


class LayersAndLoss(NamedTuple):
    """What the user's function returned; `loss` maps (last layer's result, targets [B, S]) to losses [B, S]."""

    layers: list[Any]
    loss: Loss | None


def accepted_sizes(text: str, source: str, sizes: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    """Those of the sizes that the function has parameters for. Raises PentadError if it needs any other argument."""
    function = load_function(text, MODEL, source)
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        said = f"its parameters are unknown: expected some of ({', '.join(sizes)})"
        raise user_error(text, said, MODEL) from None
    accepted = {name: size for name, size in sizes.items() if name in signature.parameters}
    try:
        signature.bind(**accepted)
    except TypeError:
        found = f"its parameters are ({', '.join(signature.parameters)})"
        raise user_error(text, f"{found}: expected some of ({', '.join(sizes)})", MODEL) from None
    return tuple(accepted.items())


def call_function(text: str, source: str, sizes: tuple[tuple[str, int], ...]) -> LayersAndLoss:
    """Calls the user's function. Raises PentadError if it fails or returns no list of layers."""
    function = load_function(text, MODEL, source)
    try:
        with redirect_stdout(sys.stderr):
            result = function(**dict(sizes))
    except (Exception, SystemExit) as error:
        raise user_error(text, f"it raises {describe_error(text, error)}: expected {EXPECTED}", MODEL) from None
    loss = None
    if isinstance(result, tuple) and len(result) == 2 and not isinstance(result[0], nn.Module):
        result, loss = result
        if not callable(loss):
            raise user_error(text, f"its loss is {reprlib.repr(loss)}: expected a function (result, targets)", MODEL)
    if not isinstance(result, list | tuple | nn.Sequential | nn.ModuleList) or not len(result):
        raise user_error(text, f"it returns {_shown(result)}: expected {EXPECTED}", MODEL)
    return LayersAndLoss(list(result), loss)


def make_layer(text: str, number: int, item: Any) -> nn.Module:
    """The module of an item of the list. Raises PentadError if there is none."""
    layer = item
    if not isinstance(item, nn.Module) and callable(item):
        try:
            with redirect_stdout(sys.stderr):
                layer = item()
        except (Exception, SystemExit) as error:
            found = f"layer {number} raises {describe_error(text, error)} when it is made"
            raise user_error(text, found, MODEL) from None
    if not isinstance(layer, nn.Module):
        raise user_error(text, f"layer {number} is {_shown(layer)}: expected a torch.nn.Module", MODEL)
    return layer


def build_layers(model: CustomModel, seed: int, first: int, end: int) -> tuple[list[nn.Module], Loss | None]:
    """Layers `first` to `end` on the CPU, with initial values that do not depend on where they are built."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(derive_seed(seed, "model"))
        items, loss = call_function(model.text, model.source, model.sizes)
        layers = []
        for number in range(first, end):
            torch.default_generator.manual_seed(derive_seed(seed, "layer", number))
            layers.append(make_layer(model.text, number, items[number]))
    return layers, loss


def initial_values(model: CustomModel, seed: int, first: int, end: int) -> dict[str, torch.Tensor]:
    """The initial parameters of layers `first` to `end` by global name."""
    layers, _ = build_layers(model, seed, first, end)
    return {
        f"layers.{number}.{name}": parameter.detach()
        for number, layer in enumerate(layers, first)
        for name, parameter in layer.named_parameters()
    }


def derive_seed(seed: int, *purpose: object) -> int:
    """A seed for one purpose, the same on every mesh."""
    text = ":".join(map(str, (seed, *purpose)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little")


def cast_layer(layer: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
    """Moves parameters and buffers to the device and the compute dtype; integer and bool buffers keep their dtype."""
    moved: dict[int, Any] = {}
    for module in layer.modules():
        buffers = module.named_buffers(recurse=False, remove_duplicate=False)
        for name, tensor in [*module.named_parameters(recurse=False, remove_duplicate=False), *buffers]:
            is_parameter = isinstance(tensor, nn.Parameter)
            if id(tensor) not in moved:
                value = tensor.detach().to(device, dtype if tensor.is_floating_point() else None)
                moved[id(tensor)] = nn.Parameter(value) if is_parameter else value
            (module._parameters if is_parameter else module._buffers)[name] = moved[id(tensor)]


def parameter_slots(layer: nn.Module) -> ParameterSlots:
    """Where modules hold each parameter: (module, attribute), several for one that modules share."""
    names = {id(parameter): name for name, parameter in layer.named_parameters()}
    slots: ParameterSlots = {name: [] for name in names.values()}
    for module in layer.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            slots[names[id(parameter)]].append((module, name))
    return slots


def _shown(found: Any) -> str:
    return f"a {type(found).__name__}" if isinstance(found, nn.Module) else reprlib.repr(found)
