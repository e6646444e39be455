"""A model of a user's own: the list of layers that the function in the user's file returns.

Each layer is a torch.nn.Module, or a function without arguments that makes one, called where the layer is held only.
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

from pentad.schedules.generators.custom_file import Kind, function_of, mistake, raised
from pentad.schedules.spec.model import CustomModel

MODEL = Kind("model", "(vocab, hidden, layers, ...)", "my.py:my_model")
WANTED = "a list of at least one torch.nn.Module, or such a list and a loss"

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Made(NamedTuple):
    """What the function returned; `loss` of (the last layer's result, targets [B, S]) gives losses [B, S]."""

    layers: list[Any]
    loss: Loss | None


def arguments(text: str, source: str, sizes: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    """Those of the sizes that the function takes by name. Raises PentadError when it takes anything else."""
    function = function_of(text, MODEL, source)
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        said = f"it does not tell its parameters: expected some of ({', '.join(sizes)})"
        raise mistake(text, said, MODEL) from None
    chosen = {name: size for name, size in sizes.items() if name in signature.parameters}
    try:
        signature.bind(**chosen)
    except TypeError:
        found = f"its parameters are ({', '.join(signature.parameters)})"
        raise mistake(text, f"{found}: expected some of ({', '.join(sizes)})", MODEL) from None
    return tuple(chosen.items())


def call(text: str, source: str, sizes: tuple[tuple[str, int], ...]) -> Made:
    """Calls the function. Raises PentadError when it fails, or returns no list of layers."""
    function = function_of(text, MODEL, source)
    try:
        with redirect_stdout(sys.stderr):
            given = function(**dict(sizes))
    except (Exception, SystemExit) as error:
        raise mistake(text, f"it raises {raised(text, error)}, {WANTED}", MODEL) from None
    loss = None
    if isinstance(given, tuple) and len(given) == 2 and not isinstance(given[0], nn.Module):
        given, loss = given
        if not callable(loss):
            raise mistake(text, f"its loss is {reprlib.repr(loss)}: expected a function (result, targets)", MODEL)
    if not isinstance(given, list | tuple | nn.Sequential | nn.ModuleList) or not len(given):
        raise mistake(text, f"it returns {_shown(given)}: expected {WANTED}", MODEL)
    return Made(list(given), loss)


def layer_of(text: str, number: int, given: Any) -> nn.Module:
    """A layer of the list. Raises PentadError when it is none."""
    made = given
    if not isinstance(given, nn.Module) and callable(given):
        try:
            with redirect_stdout(sys.stderr):
                made = given()
        except (Exception, SystemExit) as error:
            raise mistake(text, f"layer {number} raises {raised(text, error)} when it is made", MODEL) from None
    if not isinstance(made, nn.Module):
        raise mistake(text, f"layer {number} is {_shown(made)}: expected a torch.nn.Module", MODEL)
    return made


def build(own: CustomModel, seed: int, first: int, end: int) -> tuple[list[nn.Module], Loss | None]:
    """Layers `first` to `end` on the CPU with first values, which are the same wherever they are made."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(key(seed, "model"))
        made = call(own.text, own.source, own.sizes)
        layers = []
        for number in range(first, end):
            torch.default_generator.manual_seed(key(seed, "layer", number))
            layers.append(layer_of(own.text, number, made.layers[number]))
    return layers, made.loss


def initial_values(own: CustomModel, seed: int, first: int, end: int) -> dict[str, torch.Tensor]:
    """Parameters by global name."""
    layers, _ = build(own, seed, first, end)
    return {
        f"layers.{number}.{name}": parameter.detach()
        for number, layer in enumerate(layers, first)
        for name, parameter in layer.named_parameters()
    }


def key(seed: int, *what: object) -> int:
    """A seed for one purpose: the same on every mesh."""
    text = ":".join(map(str, (seed, *what)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little")


def narrow(layer: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
    """Puts the layer into the dtype of compute; buffers of anything but real numbers keep their own."""
    memo: dict[int, Any] = {}
    for module in layer.modules():
        for name, tensor in (*module.named_parameters(recurse=False, remove_duplicate=False), *_buffers(module)):
            if id(tensor) not in memo:
                moved = tensor.detach().to(device, dtype if tensor.is_floating_point() else None)
                memo[id(tensor)] = nn.Parameter(moved) if isinstance(tensor, nn.Parameter) else moved
            held = module._parameters if isinstance(tensor, nn.Parameter) else module._buffers
            held[name] = memo[id(tensor)]


def homes(layer: nn.Module) -> dict[str, list[tuple[nn.Module, str]]]:
    """Parameter -> where layers read it: (module, name there), more than one where it goes by several names."""
    names = {id(parameter): name for name, parameter in layer.named_parameters()}
    found: dict[str, list[tuple[nn.Module, str]]] = {name: [] for name in names.values()}
    for module in layer.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            found[names[id(parameter)]].append((module, name))
    return found


def _buffers(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return list(module.named_buffers(recurse=False, remove_duplicate=False))


def _shown(given: Any) -> str:
    return f"a {type(given).__name__}" if isinstance(given, nn.Module) else reprlib.repr(given)
