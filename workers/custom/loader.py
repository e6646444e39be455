"""Loads a custom model: the list of layers that a function in the user's file returns.

A layer is a torch.nn.Module, or a function without parameters that makes one and is called only on ranks that hold it.
"""

from __future__ import annotations

import inspect
import reprlib
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import redirect_stdout
from typing import Any

import torch
from torch import nn

from pentad.schedules.generators.user_file import FunctionKind, describe_error, load_function, user_error
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.spec.model import CustomModel
from pentad.workers.params.param_init import derive_seed
from pentad.workers.torch_import import load_meta_kernels

MODEL = FunctionKind("model", "(vocab, hidden, layers, ...)", "my.py:my_model")
EXPECTED = "a list of at least one torch.nn.Module, or such a list and a loss"

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # (last layer's result, targets [B, S]) -> losses [B, S]
ParameterSlots = dict[str, list[tuple[nn.Module, str]]]  # (module, attribute) by name; several if modules share one


def accepted_sizes(text: str, source: str, sizes: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    """The sizes for which the function has parameters. Raises PentadError if it needs any other argument."""
    function = load_function(text, MODEL, source)
    found = "unknown"
    try:
        signature = inspect.signature(function)
        found = f"({', '.join(signature.parameters)})"
        accepted = {name: size for name, size in sizes.items() if name in signature.parameters}
        signature.bind(**accepted)
    except (TypeError, ValueError):
        raise model_error(text, f"its parameters are {found}: expected some of ({', '.join(sizes)})") from None
    return tuple(accepted.items())


def call_function(text: str, source: str, sizes: tuple[tuple[str, int], ...]) -> tuple[list[Any], Loss | None]:
    """Calls the user's function. Raises PentadError if it fails or returns no list of layers."""
    load_meta_kernels()
    function = load_function(text, MODEL, source)
    try:
        with redirect_stdout(sys.stderr):
            result = function(**dict(sizes))
    except (Exception, SystemExit) as error:
        raise model_error(text, f"it raises {describe_error(text, error)}: expected {EXPECTED}") from None
    loss = None
    if isinstance(result, tuple) and len(result) == 2 and not isinstance(result[0], nn.Module):
        result, loss = result
        if not callable(loss):
            raise model_error(text, f"its loss is {reprlib.repr(loss)}: expected a function (result, targets)")
    if not isinstance(result, list | tuple | nn.Sequential | nn.ModuleList) or not len(result):
        raise model_error(text, f"it returns {_shown(result)}: expected {EXPECTED}")
    return list(result), loss


def make_layer(text: str, number: int, item: Any) -> nn.Module:
    """The module for an item of the list. Raises PentadError if the item is or makes none."""
    layer = item
    if not isinstance(item, nn.Module) and callable(item):
        try:
            with redirect_stdout(sys.stderr):
                layer = item()
        except (Exception, SystemExit) as error:
            found = f"layer {number} raises {describe_error(text, error)} when it is made"
            raise model_error(text, found) from None
    if not isinstance(layer, nn.Module):
        raise model_error(text, f"layer {number} is {_shown(layer)}: expected a torch.nn.Module")
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
    return {name: parameter.detach() for name, parameter in named_parameters(layers, first)}


def named_parameters(layers: list[nn.Module], first: int) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters of layers from number `first` on, by global name."""
    for number, layer in enumerate(layers, first):
        yield from layer.named_parameters(f"layers.{number}")


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


def parameter_slots(layers: list[nn.Module], first: int) -> ParameterSlots:
    """Where modules hold each parameter of the layers from number `first` on, by global name."""
    names = {id(parameter): name for name, parameter in named_parameters(layers, first)}
    slots: ParameterSlots = {name: [] for name in names.values()}
    for module in nn.ModuleList(layers).modules():
        for attribute, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            slots[names[id(parameter)]].append((module, attribute))
    return slots


def set_parameters(slots: ParameterSlots, values: Mapping[str, Any]) -> None:
    """Replaces the parameters with these values, by name."""
    for name, value in values.items():
        for module, attribute in slots[name]:
            module._parameters[attribute] = value


def model_error(text: str, found: str) -> PentadError:
    return user_error(text, found, MODEL)


def _shown(found: Any) -> str:
    return f"a {type(found).__name__}" if isinstance(found, nn.Module) else reprlib.repr(found)
