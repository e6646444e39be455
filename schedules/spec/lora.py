"""LoRA (arXiv 2106.09685): trained low-rank adapters beside the frozen tensors of a model, by their global names."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from pentad.schedules.spec.mesh import Mesh
from pentad.schedules.spec.model import ModelSpec
from pentad.schedules.spec.tensors import Split, Tensor, tensors


@dataclass(frozen=True)
class LoraSpec:
    """To the product x W^T of every target, x A^T B^T is added `alpha / rank` times; A [rank, in] and B [out, rank].

    `targets` are keys of TARGETS. `base` is the folder of the checkpoint that has the frozen weights; None: they are
    the initial values of the run's seed.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...]
    base: str | None = None

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


class Target(NamedTuple):
    """Where the weight of a module is: a tensor of a layer, and which of the matrices fused into it."""

    tensor: str
    segment: int = 0


TARGETS = {
    "q_proj": Target("attention.qkv", 0),
    "k_proj": Target("attention.qkv", 1),
    "v_proj": Target("attention.qkv", 2),
    "o_proj": Target("attention.out"),
    "gate_proj": Target("mlp.gate_up", 0),
    "up_proj": Target("mlp.gate_up", 1),
    "down_proj": Target("mlp.down"),
}


def targets_of(model: ModelSpec) -> tuple[str, ...]:
    """The modules that can have adapters: those of attention, and of the feed-forward if no layer has experts."""
    return tuple(name for name, target in TARGETS.items() if model.experts is None or "attention" in target.tensor)


def adapter_tensors(lora: LoraSpec, base: Iterable[Tensor]) -> list[Tensor]:
    """A and B for every target among the `base` tensors, in their order.

    Where tp splits the outputs of a target it splits B, and where it splits the inputs, A; the other one is replicated.
    A begins with values of the distribution of torch.nn.Linear, B with zeros.
    """
    found = []
    for tensor in base:
        for target in (each for each in lora.targets if tensor.name.endswith(f".{TARGETS[each].tensor}")):
            (split,) = tensor.splits
            at = f"{tensor.name.rpartition('.')[0]}.{target}"
            segment, inputs = split.segments[TARGETS[target].segment], tensor.shape[1]
            rows = segment.size if split.dim == 0 else tensor.shape[0]
            split_a, split_b = ((), (Split("tp", 0, (segment,)),)) if split.dim == 0 else (tensor.splits, ())
            bound = 1 / math.sqrt(inputs)
            found += [
                Tensor(f"{at}.lora_A", (lora.rank, inputs), bound, split_a, is_uniform=True),
                Tensor(f"{at}.lora_B", (rows, lora.rank), 0.0, split_b, constant=0.0),
            ]
    return found


@lru_cache(maxsize=4096)
def shard_tensors(
    model: ModelSpec, lora: LoraSpec | None, first: int, end: int, *, experts: bool, frozen: bool
) -> tuple[Tensor, ...]:
    """The tensors of a parameter shard of layers `first` to `end`; with LoRA the trained ones are the adapters."""
    found = tensors(model, first, end)
    if lora is not None and not frozen:
        found = adapter_tensors(lora, found)
    return tuple(each for each in found if each.experts is experts)


@lru_cache(maxsize=4096)
def shard_size(found: tuple[Tensor, ...], mesh: Mesh) -> int:
    """Elements that a rank of the mesh holds of these tensors."""
    return sum(math.prod(tensor.local_shape(mesh)) for tensor in found)
