"""LoRA (arXiv 2106.09685): trained low-rank adapters beside the frozen tensors of a model, by their global names."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from pentad.schedules.spec.mesh import Mesh
from pentad.schedules.spec.model import ModelSpec
from pentad.schedules.spec.tensors import LayerRange, Split, Tensor, tensors


@dataclass(frozen=True)
class LoraBase:
    """The checkpoint that has the frozen weights: its folder, and the sha256 of its manifest."""

    folder: str
    fingerprint: str


@dataclass(frozen=True)
class LoraSpec:
    """To the product x W^T of every target, x A^T B^T is added `alpha / rank` times; A [rank, in] and B [out, rank].

    `targets` are keys of TARGETS. Without a `base` the frozen weights are the initial values of the run's seed.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...]
    base: LoraBase | None = None

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    @property
    def plain(self) -> dict[str, Any]:
        """For the metadata of a checkpoint (see `lora_of`)."""
        return {**asdict(self), "targets": list(self.targets)}


def lora_of(meta: Mapping[str, Any]) -> LoraSpec | None:
    """That of a checkpoint, from the metadata in its manifest; None if it has all parameters."""
    if meta.get("lora") is None:
        return None
    found = meta["lora"]
    base = None if found["base"] is None else LoraBase(**found["base"])
    return LoraSpec(found["rank"], found["alpha"], tuple(found["targets"]), base)


class Target(NamedTuple):
    """Where the weight of a module is: a tensor of a layer, and which of the matrices fused into it; None: all."""

    tensor: str
    segment: int | None = None


TARGETS = {
    "q_proj": Target("attention.qkv", 0),
    "k_proj": Target("attention.qkv", 1),
    "v_proj": Target("attention.qkv", 2),
    "o_proj": Target("attention.out"),
    "gate_proj": Target("mlp.gate_up", 0),
    "up_proj": Target("mlp.gate_up", 1),
    "down_proj": Target("mlp.down"),
    "qkv_proj": Target("attention.qkv"),
    "gate_up_proj": Target("mlp.gate_up"),
}
FUSED = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
SEPARATE = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def targets_of(model: ModelSpec, *, fused: bool = False) -> tuple[str, ...]:
    """The modules that can have adapters: those of attention, and of the feed-forward if no layer has experts. `fused`:
    the family has one module for queries, keys and values, and one for gate and up."""
    names = FUSED if fused else SEPARATE
    return tuple(name for name in names if model.experts is None or "attention" in TARGETS[name].tensor)


def adapter_tensors(lora: LoraSpec, base: Iterable[Tensor]) -> list[Tensor]:
    """A and B for every target among the `base` tensors, in their order.

    Where tp splits the outputs of a target it splits B, and where it splits the inputs, A; the other one is replicated.
    A begins with values of the distribution of torch.nn.Linear, B with zeros.
    """
    found = []
    for tensor in base:
        for target in (name for name in TARGETS if name in lora.targets):
            if not tensor.name.endswith(f".{TARGETS[target].tensor}"):
                continue
            (split,) = tensor.splits
            at = f"{tensor.name.rpartition('.')[0]}.{target}"
            number, inputs = TARGETS[target].segment, tensor.shape[1]
            segments = split.segments if number is None else (split.segments[number],)
            rows = sum(segment.size for segment in segments) if split.dim == 0 else tensor.shape[0]
            split_a, split_b = ((), (Split("tp", 0, segments),)) if split.dim == 0 else (tensor.splits, ())
            bound = 1 / math.sqrt(inputs)
            found += [
                Tensor(f"{at}.lora_A", (lora.rank, inputs), bound, split_a, is_uniform=True),
                Tensor(f"{at}.lora_B", (rows, lora.rank), 0.0, split_b, constant=0.0),
            ]
    return found


def trained_tensors(model: ModelSpec, lora: LoraSpec | None) -> list[Tensor]:
    """Of the whole model: the adapters, or without LoRA all its tensors."""
    found = tensors(model)
    return found if lora is None else adapter_tensors(lora, found)


@lru_cache(maxsize=4096)
def shard_tensors(
    model: ModelSpec, lora: LoraSpec | None, layers: LayerRange, *, experts: bool, frozen: bool
) -> tuple[Tensor, ...]:
    """The tensors of a parameter shard of these layers; with LoRA the trained ones are the adapters."""
    found = tensors(model, layers)
    if lora is not None and not frozen:
        found = adapter_tensors(lora, found)
    return tuple(each for each in found if each.experts is experts)


@lru_cache(maxsize=4096)
def shard_size(found: tuple[Tensor, ...], mesh: Mesh) -> int:
    """Elements that a rank of the mesh holds of these tensors."""
    return sum(math.prod(tensor.local_shape(mesh)) for tensor in found)
