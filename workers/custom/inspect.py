"""A user's model looked at before it runs: shapes of its parameters and results, FLOPs, and all that cannot be trained.

Tensors without memory (torch's fake tensors) go through every layer once, so a model of any size takes seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from pentad.schedules.generators.custom_file import mistake, raised, source_of
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.spec.model import CustomLayer, CustomModel
from pentad.workers.custom.loader import MODEL, arguments, call, layer_of, narrow

CPU = torch.device("cpu")


def _attention(q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(q, k, v))


COUNTS = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention}  # which torch does not count


def look(text: str, sizes: Mapping[str, int], dtype: torch.dtype) -> CustomModel:
    """The model that `text` = 'FILE.py:FUNCTION' makes of those sizes that its function takes; of them 'vocab',
    'hidden' and 'length' bind its results. Raises PentadError for what cannot be trained, naming the layer."""
    source = source_of(text, MODEL)
    chosen = arguments(text, source, sizes)
    return _look(text, source, chosen, sizes["vocab"], sizes["hidden"], sizes["length"], dtype)


@lru_cache(16)
def _look(
    text: str, source: str, sizes: tuple[tuple[str, int], ...], vocab: int, hidden: int, length: int, dtype: torch.dtype
) -> CustomModel:
    rows = 2
    with FakeTensorMode(allow_non_fake_inputs=True):
        made = call(text, source, sizes)
        seen: dict[int, tuple[nn.Parameter, int]] = {}
        x, found = torch.zeros(rows, length, dtype=torch.int64), []
        for number, given in enumerate(made.layers):
            layer = layer_of(text, number, given)
            _require_trainable(text, number, layer, seen)
            narrow(layer, dtype, CPU)
            last = number == len(made.layers) - 1
            y, flops, is_random = _through(text, number, layer, x)
            if not last or made.loss is None:
                expected = (rows, length, vocab if last else hidden)
                _require_result(text, number, y, expected, "model.vocab" if last else "model.hidden", dtype)
            tensors = tuple((name, tuple(map(int, p.shape))) for name, p in layer.named_parameters())
            found.append(CustomLayer(tensors, flops // rows, is_random))
            x = y.detach()
        if made.loss is not None:
            _require_loss(text, made.loss, x, torch.zeros(rows, length, dtype=torch.int64))
    return CustomModel(text, source, length, sizes, tuple(found))


class _Draws(TorchDispatchMode):
    """Notes whether an operation draws random numbers."""

    seen = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen = self.seen or torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))


def _through(text: str, number: int, layer: nn.Module, x: Tensor) -> tuple[Tensor, int, bool]:
    """(result, FLOPs, whether it draws random numbers), with autograd's way back tried as well."""
    given = x.requires_grad_() if x.is_floating_point() else x
    buffers = {name: (buffer, buffer._version) for name, buffer in layer.named_buffers()}
    parameters = dict(layer.named_parameters())
    try:
        with torch.enable_grad(), _Draws() as draws, FlopCounterMode(display=False, custom_mapping=COUNTS) as counter:
            y = layer(given)
        tensors = [*parameters.values(), *([given] if given.requires_grad else [])]
        found: Any = ()
        if isinstance(y, Tensor) and y.requires_grad and tensors:
            found = torch.autograd.grad(y, tensors, torch.zeros_like(y), allow_unused=True)
    except PentadError:
        raise
    except Exception as error:
        of = f"layer {number} ({type(layer).__name__})"
        raise mistake(text, f"{of} raises {raised(text, error)} for {_shape(x)}", MODEL) from None
    if not isinstance(y, Tensor):
        raise _wrong(text, number, layer, f"returns a {type(y).__name__}: expected a tensor")
    unused = [
        name for name, gradient in zip(parameters, found or [None] * len(parameters), strict=False) if gradient is None
    ]
    if unused:
        raise _wrong(text, number, layer, f"has a parameter {unused[0]!r} that its result does not depend on")
    changed = [name for name, (buffer, version) in buffers.items() if buffer._version != version]
    if changed:
        raise _wrong(text, number, layer, f"changes its buffer {changed[0]!r} in forward: expected one that stays")
    return y, int(counter.get_total_flops()), draws.seen


def _require_trainable(text: str, number: int, layer: nn.Module, seen: dict[int, tuple[nn.Parameter, int]]) -> None:
    """`seen` are the parameters of the layers before, and where those are."""
    kept = layer.state_dict(keep_vars=True)
    for name, parameter in layer.named_parameters():
        if not parameter.is_floating_point():
            dtype = str(parameter.dtype).removeprefix("torch.")
            raise _wrong(text, number, layer, f"has a parameter {name!r} of {dtype}: expected real numbers")
        if not parameter.requires_grad:
            raise _wrong(text, number, layer, f"has a parameter {name!r} without requires_grad: expected none")
        if id(parameter) in seen:
            said = (
                f"shares its parameter {name!r} with layer {seen[id(parameter)][1]}: expected layers that share nothing"
            )
            raise _wrong(text, number, layer, said)
        seen[id(parameter)] = parameter, number
    for name, _ in layer.named_buffers():
        if name in kept:
            said = f"has a buffer {name!r} that changes or is saved: expected none but tables (persistent=False)"
            raise _wrong(text, number, layer, said)


def _require_result(
    text: str, number: int, y: Tensor, expected: tuple[int, ...], width: str, dtype: torch.dtype
) -> None:
    if tuple(y.shape) != expected:
        said = f"layer {number} gives {_shape(y)}: expected {list(expected)} (rows, batch.sequence_length, {width})"
        raise mistake(text, said, MODEL)
    if y.dtype != dtype:
        found, asked = (str(each).removeprefix("torch.") for each in (y.dtype, dtype))
        raise mistake(text, f"layer {number} gives {found}: expected the dtype of compute, {asked}", MODEL)


def _require_loss(text: str, loss: Callable[[Tensor, Tensor], Tensor], x: Tensor, targets: Tensor) -> None:
    try:
        made: Any = loss(x, targets)
    except Exception as error:
        raise mistake(text, f"its loss raises {raised(text, error)} for {_shape(x)}", MODEL) from None
    if not isinstance(made, Tensor) or made.shape != targets.shape:
        found = _shape(made) if isinstance(made, Tensor) else f"a {type(made).__name__}"
        raise mistake(text, f"its loss gives {found}: expected one of every token, {list(targets.shape)}", MODEL)


def _wrong(text: str, number: int, layer: nn.Module, said: str) -> PentadError:
    return mistake(text, f"layer {number} ({type(layer).__name__}) {said}", MODEL)


def _shape(tensor: Tensor) -> str:
    return str(list(tensor.shape))
