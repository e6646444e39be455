"""Bytes that a stage of a user's own layers keeps, found by taking tensors without memory through its F and B."""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from pentad.schedules.spec.model import CustomModel
from pentad.workers.custom.autograd import Owner, Tape, Watch, bound, end_of, storage_of
from pentad.workers.custom.loader import build, homes, narrow
from pentad.workers.model.weight_grad import Deferred

CPU = torch.device("cpu")


class Bytes(NamedTuple):
    """Of one piece: what F keeps besides the tensor it received, `movable` of it by OFFLOAD, the most that one layer
    adds to it, and what B leaves to W."""

    kept: int
    movable: int
    layer: int
    deferred: int


@lru_cache(256)
def bytes_of(own: CustomModel, first: int, end: int, hidden: int, rows: int, dtype: torch.dtype) -> Bytes:
    """As kernels on a CPU keep it: those of a GPU may keep other statistics of attention and norms."""
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    with FakeTensorMode(allow_non_fake_inputs=True):
        layers, loss = build(own, 0, first, end)
        places = {
            f"layers.{n}.{name}": at for n, layer in enumerate(layers, first) for name, at in homes(layer).items()
        }
        shapes = {f"layers.{n}.{name}": shape for n in range(first, end) for name, shape in own.layers[n].tensors}
        owner = Owner()
        owner.now = bound(_views(shapes, dtype), _views(shapes, wide), owner, Tensor)
        for layer in layers:
            narrow(layer, dtype, CPU)
        for name, leaf in owner.now.leaves.items():
            for module, own_name in places[name]:
                module._parameters[own_name] = leaf  # type: ignore[assignment]
        tokens = torch.zeros(rows, own.length, dtype=torch.int64)
        received = None if first == 0 else torch.zeros(rows, own.length, hidden, dtype=dtype, requires_grad=True)
        tape, x, made = Tape(owner), tokens if received is None else received, []
        with tape.recording(), Watch():
            for layer in layers:
                x = layer(x)
                made.append(len(tape.saved))
            if end == len(own.layers) and loss is not None:
                x = loss(x, tokens)
        ends = [x, torch.zeros(rows, own.length, dtype=wide)] if end == len(own.layers) else []
        slots = {storage_of(each) for each in (received,) if each is not None}
        saved = list(tape.saved)
        kept, layer_bytes = _bytes([*saved, *ends], slots), 0
        for start, stop in zip([0, *made], made, strict=False):
            layer_bytes = max(layer_bytes, _bytes(saved[start:stop], slots))
        moving = [each for each in saved if each.is_floating_point() and each.dim() > 1]
        tape.backward(received, end_of(x), torch.zeros_like(x))
        work = [each for item in tape.work for each in _read(item)]
        return Bytes(kept, _bytes(moving, slots | {storage_of(x)}), layer_bytes, _bytes(work, set()))


def _views(shapes: dict[str, tuple[int, ...]], dtype: torch.dtype) -> dict[str, Tensor]:
    flat = torch.zeros(sum(map(math.prod, shapes.values())), dtype=dtype)
    parts = flat.split([math.prod(shape) for shape in shapes.values()])
    return {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}


def _read(item: Deferred) -> list[Tensor]:
    given = item._asdict()
    del given["gradient"]
    return [each for each in chain(given.values()) if isinstance(each, Tensor)]


def _bytes(tensors: list[Tensor], without: set[int]) -> int:
    """Of storages, each counted once."""
    found = {storage_of(each): each.untyped_storage().nbytes() for each in tensors}
    return sum(size for at, size in found.items() if at not in without)
