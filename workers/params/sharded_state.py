"""How a checkpoint keeps a tensor that ranks share out: every rank's part by itself, under a name that says which.

`model.embedding` is whole; `model.embedding@0-150,0-16` are rows 0 to 149 and columns 0 to 15, and a dimension of
several ranges has them joined by `+`. Any mesh puts the parts of another one together.
"""

from __future__ import annotations

from itertools import accumulate, product

import torch

from pentad.schedules.ir.errors import PentadError
from pentad.schedules.spec.plan import ParamShard, Plan
from pentad.schedules.spec.tensors import Range
from pentad.workers.checkpoint import checkpoint
from pentad.workers.checkpoint.checkpoint import Checkpoint
from pentad.workers.params.parameters import Local, Parameters


def file_of(plan: Plan, share: ParamShard) -> str:
    """The file that a share is saved in."""
    tensor = f"-tp{share.tp}" if plan.mesh.tp > 1 else ""
    experts = f"-experts{share.ep}" if share.experts else ""
    return f"stage-{share.stage:03d}{experts}{tensor}.safetensors"


def named(parameters: Parameters, state: dict[str, torch.Tensor], share: ParamShard) -> dict[str, torch.Tensor]:
    """Tensors by kind and name, of whole flat buffers by kind, and biases; of what all tensor ranks hold, the first
    one's."""
    found = {}
    for kind, flat in state.items():
        views = parameters.views(flat)
        for local in parameters.locals:
            if not local.tensor.like and (share.tp == 0 or any(cut.axis == "tp" for cut in local.tensor.cuts)):
                found[f"{kind}.{stored(local)}"] = views[local.name]
    if share.tp == 0:
        found |= {f"model.{name}": bias for name, bias in parameters.biases.named.items()}
    return found


def read_whole(found: Checkpoint, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor, whatever parts it was saved in; zeros for a moment of the optimizer where a checkpoint has none at all,
    as an imported one. Raises PentadError where a part is missing or of another size."""
    if name.startswith("optimizer.") and not any(held.startswith("optimizer.") for held in found.where):
        return torch.zeros(shape)
    if name in found.where:
        whole = checkpoint.read(found, [name])[name]
        if whole.shape != shape:
            text = f"tensor {name} of checkpoint {found.folder} has the shape {list(whole.shape)}"
            raise PentadError(f"{text}: expected {list(shape)}, as the model's sizes say")
        return whole
    made = Assembly(shape)
    for key in sorted(key for key in found.where if key.startswith(f"{name}@")):
        made.put(checkpoint.read(found, [key])[key], key)
    if made.missing == made.seen.numel():
        raise PentadError(f"tensor {name} is not in checkpoint {found.folder}")
    if made.missing:
        raise PentadError(f"tensor {name} of checkpoint {found.folder} lacks {made.missing} of its elements")
    return made.whole


class Assembly:
    """A tensor of some shape while its parts come in; `missing` elements have not come yet."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.seen = torch.zeros(shape, dtype=torch.bool)
        self.whole = torch.empty(0)

    @property
    def missing(self) -> int:
        return int((~self.seen).sum())

    def put(self, part: torch.Tensor, name: str) -> None:
        """Writes a part, flat or in its shape, to where its stored name says, block by block."""
        if not self.whole.numel():
            self.whole = part.new_empty(self.seen.shape)
        ranges = _ranges(name) if "@" in name else [[(0, size)] for size in self.seen.shape]
        part = part.view([sum(end - start for start, end in dim) for dim in ranges])
        for block in product(*(_places(dim) for dim in ranges)):
            there = tuple(slice(start, end) for _, (start, end) in block)
            here = tuple(slice(first, first + end - start) for first, (start, end) in block)
            self.whole[there] = part[here]
            self.seen[there] = True


def _places(ranges: list[Range]) -> list[tuple[int, Range]]:
    """Where each range begins in a part, and the range."""
    starts = accumulate((end - start for start, end in ranges), initial=0)
    return list(zip(starts, ranges, strict=False))


def stored(local: Local) -> str:
    """The name that says which part it is."""
    if local.is_whole:
        return local.name
    return f"{local.name}@" + ",".join("+".join(f"{a}-{b}" for a, b in ranges) for ranges in local.ranges)


def _ranges(name: str) -> list[list[Range]]:
    dims = name.partition("@")[2].split(",")
    found = [[each.split("-") for each in dim.split("+")] for dim in dims]
    return [[(int(start), int(end)) for start, end in dim] for dim in found]
