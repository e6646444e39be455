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


@dataclass(frozen=True)
class Parameters:
    """Flat buffers of one stage, all of the same length and order.

    `master`, `gradient`, `m`, `v` are float32 (float64 when compute is); `compute` is what layers read: `master` itself
    or its copy in the compute dtype. `decayed` is how many leading elements belong to matrices.
    """

    specs: tuple[Spec, ...]
    master: torch.Tensor
    compute: torch.Tensor
    gradient: torch.Tensor
    m: torch.Tensor
    v: torch.Tensor
    decayed: int

    def views(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """Name -> its part of a flat buffer, in its own shape."""
        found, start = {}, 0
        for spec in self.specs:
            size = math.prod(spec.shape)
            found[spec.name] = flat[start : start + size].view(spec.shape)
            start += size
        return found

    def state(self) -> dict[str, torch.Tensor]:
        """What a checkpoint keeps: master weights and both moments by global name."""
        flats = {"model": self.master, "optimizer.m": self.m, "optimizer.v": self.v}
        return {f"{kind}.{name}": view for kind, flat in flats.items() for name, view in self.views(flat).items()}

    def refresh(self) -> None:
        """Writes the compute copy from the master weights."""
        if self.compute is not self.master:
            self.compute.copy_(self.master)


def create(plan: Plan, stage: int, device: torch.device, *, blank: bool = False) -> Parameters:
    """A stage's buffers with their first values, which depend on the seed and the parameter's name alone.

    `blank` ones hold zeros, for state that comes from elsewhere: making values takes seconds a billion.
    """
    found = tuple(specs(plan.model, *plan.layers[stage]))
    size = sum(math.prod(spec.shape) for spec in found)
    compute_dtype = DTYPES[plan.dtype]
    dtype = torch.float64 if compute_dtype is torch.float64 else torch.float32
    master, gradient, m, v = (torch.zeros(size, dtype=dtype, device=device) for _ in range(4))
    ahead = is_validated(plan.program)  # the compute weights are then a step ahead of the master's
    shared = compute_dtype is dtype and not ahead
    compute = master if shared else torch.empty(size, dtype=compute_dtype, device=device)
    decayed = sum(math.prod(spec.shape) for spec in found if len(spec.shape) > 1)
    parameters = Parameters(found, master, compute, gradient, m, v, decayed)
    views = parameters.views(master)
    for spec in () if blank else found:
        views[spec.name].copy_(first_value(spec, plan.seed))
    parameters.refresh()
    return parameters


def first_value(spec: Spec, seed: int) -> torch.Tensor:
    """float32 on the CPU, the same on every machine and mesh."""
    if spec.scale == 0.0:
        return torch.ones(spec.shape)
    digest = hashlib.blake2b(f"{seed}:{spec.name}".encode(), digest_size=7).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
    return torch.empty(spec.shape).normal_(0.0, spec.scale, generator=generator)
