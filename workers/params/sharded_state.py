"""How checkpoints store split tensors: every rank's part separately, under a name that says which part it is.

`model.embedding` is a full tensor; `model.embedding@0-150,0-16` are its rows 0 to 149 and columns 0 to 15. Several
ranges of a dimension are joined by `+`. Any mesh can assemble the parts that another one wrote. Ranks that hold the
same part, or ZeRO shards of it, each write a piece of it (see manifest.StoredPart).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from threading import BoundedSemaphore

import torch

from pentad.schedules.ir.errors import PentadError
from pentad.schedules.spec.plan import ParamShard, Plan
from pentad.schedules.spec.tensors import Range
from pentad.workers.checkpoint import shards
from pentad.workers.checkpoint.checkpoint import Checkpoint
from pentad.workers.checkpoint.manifest import piece_name
from pentad.workers.params.local_tensor import LocalTensor
from pentad.workers.params.parameters import Parameters, StatePart

READ_ELEMENTS = 2**23  # of a tensor, read by a thread at a time
READ_BYTES = 4 * READ_ELEMENTS
StateRead = Callable[[torch.Tensor], object]  # called with a buffer [READ_BYTES]
_ASSEMBLING = BoundedSemaphore(4)  # full tensors in memory at once


def shard_file(plan: Plan, shard: ParamShard, index: int, count: int) -> str:
    """The file with part `index` of `count` of a parameter shard."""
    tp = f"-tp{shard.tp}" if plan.mesh.tp > 1 else ""
    experts = f"-experts{shard.ep}" if shard.experts else ""
    part = f"-part{index}" if count > 1 else ""
    return f"stage-{shard.stage:03d}{experts}{tp}{part}.safetensors"


def checkpoint_tensors(parameters: Parameters, shard: ParamShard, index: int, count: int) -> dict[str, torch.Tensor]:
    """What a rank stores of a parameter shard, by kind and name, as views: part `index` of `count` equal parts of what
    it holds.

    Tensors replicated over tp are stored by the first tp rank, tied copies not at all.
    """
    parts = [
        (kind, local, span, values)
        for kind, local, span, values in parameters.state_parts()
        if not local.tensor.tied_to and (shard.tp == 0 or any(split.axis == "tp" for split in local.tensor.splits))
    ]
    result = {}
    for kind, local, span, values in _cut(parts, index, count):
        name = piece_name(f"{kind}.{stored_name(local)}", local.shape, span.start, span.stop)
        result[name] = values.view(local.shape) if values.numel() == local.size else values
    return result


def _cut(parts: Sequence[StatePart], index: int, count: int) -> Iterator[StatePart]:
    """Part `index` of `count` parts with equally many elements, so that at most `count` tensors are cut."""
    total = sum(values.numel() for *_, values in parts)
    begin, end, at = total * index // count, total * (index + 1) // count, 0
    for kind, local, span, values in parts:
        first, last = max(begin - at, 0), min(end - at, values.numel())
        if first < last:
            yield kind, local, slice(span.start + first, span.start + last), values[first:last]
        at += values.numel()


def state_reads(source: Checkpoint, part: StatePart) -> Iterator[StateRead]:
    """Functions that read a part of the state from a checkpoint, in any order and concurrently.

    If the tensor is stored in the same parts, whose pieces may be in several files, they read nothing else, at most
    READ_ELEMENTS at a time so that threads share a large tensor. Otherwise one function reads all of it, as
    `read_full`.
    """
    kind, local, span, values = part
    name = f"{kind}.{local.tensor.tied_to or local.name}"
    stored = f"{kind}.{stored_name(local, local.tensor.tied_to or local.name)}"
    if stored in source.tensors and source.tensors[stored][0].shape == local.shape:
        for at in range(0, values.numel(), READ_ELEMENTS):
            yield partial(_read_stored, source, stored, span.start + at, values[at : at + READ_ELEMENTS])
    else:
        yield partial(_read_assembled, source, name, local, span, values)


def _read_stored(source: Checkpoint, stored: str, start: int, values: torch.Tensor, buffer: torch.Tensor) -> None:
    values.copy_(shards.read_elements(source, stored, start, start + values.numel(), buffer))


def _read_assembled(
    source: Checkpoint, name: str, local: LocalTensor, span: slice, values: torch.Tensor, buffer: torch.Tensor
) -> None:
    with _ASSEMBLING:
        values.copy_(local.slice_of(read_full(source, name, local.tensor.shape)).flatten()[span])


def read_full(source: Checkpoint, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """A full tensor, in whatever parts it was stored.

    Optimizer state is zeros if the checkpoint has none, such as an imported one, or has another optimizer's for this
    tensor. Raises PentadError if a part is missing or has another shape.
    """
    if name.startswith("optimizer.") and not _has_state(source, name):
        return torch.zeros(shape)
    if name in source.tensors:
        tensor = shards.read(source, [name])[name]
        if tensor.shape != shape:
            found = f"tensor {name} of checkpoint {source.folder} has shape {list(tensor.shape)}"
            raise PentadError(f"{found}: expected {list(shape)}, from the model's sizes")
        return tensor
    assembly = TensorAssembly(shape)
    for key in sorted(key for key in source.tensors if key.startswith(f"{name}@")):
        assembly.add(shards.read(source, [key])[key], key)
    if assembly.missing == assembly.seen.numel():
        raise PentadError(f"tensor {name} is not in checkpoint {source.folder}")
    if assembly.missing:
        raise PentadError(f"tensor {name} of checkpoint {source.folder} lacks {assembly.missing} of its elements")
    return assembly.tensor


def _has_state(source: Checkpoint, name: str) -> bool:
    """Whether a checkpoint should have this optimizer state: it has some state, but none of another kind for the
    tensor."""
    stored = {key.partition("@")[0] for key in source.tensors if key.startswith("optimizer.")}
    tensor = name.split(".", 2)[2]
    return name in stored or (bool(stored) and not any(key.split(".", 2)[2] == tensor for key in stored))


def stored_dtype(source: Checkpoint, name: str) -> torch.dtype | None:
    """The dtype of a tensor or of its parts; None if the checkpoint has neither."""
    stored = next((key for key in source.tensors if key.partition("@")[0] == name), None)
    return None if stored is None else shards.dtype_of(source, stored)


def optimizer_kinds(source: Checkpoint) -> list[str]:
    """The kinds of optimizer state, without the prefix: m, v."""
    return sorted({name.split(".")[1] for name in source.tensors if name.startswith("optimizer.")})


class TensorAssembly:
    """A tensor assembled from its parts."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.seen = torch.zeros(shape, dtype=torch.bool)
        self.tensor = torch.empty(0)

    @property
    def missing(self) -> int:
        """The number of elements that no part has contained so far."""
        return int((~self.seen).sum())

    def add(self, part: torch.Tensor, name: str) -> None:
        """Writes a part, flat or shaped, to the ranges in its stored name."""
        if not self.tensor.numel():
            self.tensor = part.new_empty(self.seen.shape)
        ranges = _ranges(name) if "@" in name else [[(0, size)] for size in self.seen.shape]
        part = part.view([sum(end - start for start, end in dim) for dim in ranges])
        for block in product(*map(_slices, ranges)):
            target, source = (tuple(pair[side] for pair in block) for side in (0, 1))
            self.tensor[target] = part[source]
            self.seen[target] = True


def stored_name(local: LocalTensor, tensor: str = "") -> str:
    """The name in a checkpoint of a part of `tensor`, by default the local tensor's own name."""
    name = tensor or local.name
    if local.is_full:
        return name
    return f"{name}@" + ",".join("+".join(f"{a}-{b}" for a, b in ranges) for ranges in local.ranges)


def _ranges(name: str) -> list[list[Range]]:
    dims = name.partition("@")[2].split(",")
    pairs = [[each.split("-") for each in dim.split("+")] for dim in dims]
    return [[(int(start), int(end)) for start, end in dim] for dim in pairs]


def _slices(ranges: list[Range]) -> Iterator[tuple[slice, slice]]:
    """Where each range of a dimension is in the full tensor and in the part."""
    offset = 0
    for start, end in ranges:
        yield slice(start, end), slice(offset, offset + end - start)
        offset += end - start
