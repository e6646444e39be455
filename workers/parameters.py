"""The parameters of one stage: flat buffers, named views, reproducible first values."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from pentad.schedules.plan import ModelShape, Plan
from pentad.schedules.validation import is_validated

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}


class Spec(NamedTuple):
    """A parameter by its global name; `scale` is the standard deviation of its first value, 0 means ones."""

    name: str
    shape: tuple[int, ...]
    scale: float


def specs(model: ModelShape, first: int, end: int) -> list[Spec]:
    """Parameters of decoder layers `first` to `end`, with the embedding and the head where the range touches the ends.

    Matrices [out, in] come first, norms last: weight decay is for matrices only.
    """
    h, d, std = model.hidden, model.head_dim, 0.02
    deep = std / math.sqrt(2 * model.layers)
    matrices, norms = [], []
    if first == 0:
        matrices.append(Spec("embedding", (model.vocab, h), std))
    for layer in range(first, end):
        at = f"layers.{layer}"
        matrices += [
            Spec(f"{at}.attention.qkv", ((model.heads + 2 * model.kv_heads) * d, h), std),
            Spec(f"{at}.attention.out", (h, model.heads * d), deep),
            Spec(f"{at}.mlp.gate_up", (2 * model.ffn, h), std),
            Spec(f"{at}.mlp.down", (h, model.ffn), deep),
        ]
        norms += [Spec(f"{at}.attention_norm", (h,), 0.0), Spec(f"{at}.mlp_norm", (h,), 0.0)]
    if end == model.layers:
        matrices.append(Spec("head", (model.vocab, h), std))
        norms.append(Spec("norm", (h,), 0.0))
    return matrices + norms


class Cut(NamedTuple):
    """A stage's parameters end to end, `size` of them, in `parts` equal shards, of which this is `number`; the
    last one is filled up with zeros."""

    size: int
    parts: int = 1
    number: int = 0

    @property
    def length(self) -> int:
        return -(-self.size // self.parts)

    @property
    def span(self) -> slice:
        """Of the shard in a whole buffer."""
        return slice(self.number * self.length, (self.number + 1) * self.length)


class Piece(NamedTuple):
    """What a shard has of a tensor: its elements `span`, in C order."""

    spec: Spec
    span: slice
    values: torch.Tensor


@dataclass(frozen=True)
class Parameters:
    """Flat buffers of one stage, all of the same order, and of the length of a shard (the stage, where it is not cut).

    `master`, `gradient`, `m`, `v` are float32 (float64 when compute is); `compute` is what STEP makes of `master`:
    itself or its copy in the compute dtype. `weights` and `gradients` are whole, what layers read and add to: where
    there is but one shard `compute` and `gradient` themselves, else buffers that those are a part of, or None where
    other stages use them too (see shards.py).
    """

    specs: tuple[Spec, ...]
    cut: Cut
    master: torch.Tensor
    compute: torch.Tensor
    gradient: torch.Tensor
    m: torch.Tensor
    v: torch.Tensor
    weights: torch.Tensor | None
    gradients: torch.Tensor | None

    @property
    def decayed(self) -> int:
        """How many leading elements belong to matrices."""
        matrices = sum(math.prod(spec.shape) for spec in self.specs if len(spec.shape) > 1)
        return min(max(0, matrices - self.cut.span.start), self.cut.length)

    def views(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """Name -> its part of a whole flat buffer, in its own shape."""
        found, start = {}, 0
        for spec in self.specs:
            size = math.prod(spec.shape)
            found[spec.name] = flat[start : start + size].view(spec.shape)
            start += size
        return found

    def pieces(self, flat: torch.Tensor) -> list[Piece]:
        """What a shard has of the stage's tensors."""
        found, start = [], 0
        for spec in self.specs:
            size, span = math.prod(spec.shape), self.cut.span
            first, end = max(start, span.start), min(start + size, span.stop)
            if first < end:
                values = flat[first - span.start : end - span.start]
                found.append(Piece(spec, slice(first - start, end - start), values))
            start += size
        return found

    def state(self) -> dict[str, torch.Tensor]:
        """What a checkpoint keeps, by kind: master weights and both moments."""
        return {"model": self.master, "optimizer.m": self.m, "optimizer.v": self.v}

    def named(self, flats: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Tensors by kind and global name, of whole flat buffers by kind."""
        return {f"{kind}.{name}": view for kind, flat in flats.items() for name, view in self.views(flat).items()}

    def refresh(self) -> None:
        """Writes the compute copy from the master weights."""
        if self.compute is not self.master:
            self.compute.copy_(self.master)


def create(plan: Plan, stage: int, device: torch.device, *, rank: int = 0, blank: bool = False) -> Parameters:
    """A stage's buffers on a rank with their first values, which depend on the seed and the parameter's name alone.

    `blank` ones hold zeros, for state that comes from elsewhere: making values takes seconds a billion.
    """
    found = tuple(specs(plan.model, *plan.layers[stage]))
    cut = cut_of(plan, stage, rank)
    narrow = DTYPES[plan.dtype]
    wide = torch.float64 if narrow is torch.float64 else torch.float32

    def zeros(parts: int = 1, dtype: torch.dtype = wide) -> torch.Tensor:
        return torch.zeros(parts * cut.length, dtype=dtype, device=device)

    # The compute weights may be a step ahead of the master's, else they can be the same.
    shared = narrow is wide and not is_validated(plan.program)
    alone = cut.parts == 1
    weights = zeros(cut.parts, narrow) if alone or plan.zero < 3 else None
    gradients = zeros(cut.parts) if alone or plan.zero < 2 else None
    compute = zeros(1, narrow) if weights is None else weights[cut.span]
    gradient = zeros() if gradients is None else gradients[cut.span]
    master = compute if shared else zeros()
    parameters = Parameters(found, cut, master, compute, gradient, zeros(), zeros(), weights, gradients)
    for piece in () if blank else parameters.pieces(master):
        piece.values.copy_(first_value(piece.spec, plan.seed).flatten()[piece.span])
    parameters.refresh()
    return parameters


def cut_of(plan: Plan, stage: int, rank: int) -> Cut:
    """The shard of a rank: that of its place among the stage's holders."""
    size = plan.model.stage_parameters(*plan.layers[stage])
    parts = plan.shards(stage)
    return Cut(size, parts, plan.holders(stage).index(rank)) if parts > 1 else Cut(size)


def first_value(spec: Spec, seed: int) -> torch.Tensor:
    """float32 on the CPU, the same on every machine and mesh."""
    if spec.scale == 0.0:
        return torch.ones(spec.shape)
    digest = hashlib.blake2b(f"{seed}:{spec.name}".encode(), digest_size=7).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
    return torch.empty(spec.shape).normal_(0.0, spec.scale, generator=generator)
