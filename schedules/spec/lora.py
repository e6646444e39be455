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
    """Adds `alpha / rank` times x A^T B^T to the product x W^T of every target, with A [rank, in] and B [out, rank].

    `targets` are keys of TARGETS; every expert has an A and a B of its own. Without a `base` the frozen weights are the
    initial values of the run's seed.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...]
    base: LoraBase | None = None

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    @property
    def adapts_experts(self) -> bool:
        return any(target.startswith("experts.") for target in self.targets)

    @property
    def plain(self) -> dict[str, Any]:
        """Plain data for the metadata of a checkpoint (see `lora_of`)."""
        return {**asdict(self), "targets": list(self.targets)}


def lora_of(meta: Mapping[str, Any]) -> LoraSpec | None:
    """The LoRA of a checkpoint, from the metadata in its manifest; None if it has all parameters."""
    if meta.get("lora") is None:
        return None
    found = meta["lora"]
    base = None if found["base"] is None else LoraBase(**found["base"])
    return LoraSpec(found["rank"], found["alpha"], tuple(found["targets"]), base)


class Target(NamedTuple):
    """Where the weight of a module is: a tensor of a layer, and which of the matrices fused into it; None: all."""

    tensor: str
    segment: int | None = None


# By PEFT's names of modules or, after `experts.`, of parameters. MLA without a query latent has q_proj as well.
TARGETS = {
    "q_proj": (Target("attention.qkv", 0), Target("attention.query")),
    "k_proj": (Target("attention.qkv", 1),),
    "v_proj": (Target("attention.qkv", 2),),
    "q_a_proj": (Target("attention.query_down"),),
    "q_b_proj": (Target("attention.query"),),
    "kv_a_proj_with_mqa": (Target("attention.latent"),),
    "kv_b_proj": (Target("attention.keys_values"),),
    "o_proj": (Target("attention.out"),),
    "gate_proj": (Target("mlp.gate_up", 0),),
    "up_proj": (Target("mlp.gate_up", 1),),
    "down_proj": (Target("mlp.down"),),
    "qkv_proj": (Target("attention.qkv"),),
    "gate_up_proj": (Target("mlp.gate_up"),),
    "experts.gate_up_proj": (Target("experts.gate_up"),),
    "experts.down_proj": (Target("experts.down"),),
}
SEPARATE = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
FUSED = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
LATENT_ATTENTION = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
EXPERTS = ("experts.gate_up_proj", "experts.down_proj")


def targets_of(model: ModelSpec, *, fused: bool = False) -> tuple[str, ...]:
    """The targets that can have adapters: the modules of attention, and those of the feed-forward network or, in a
    model with experts, the experts' weights. `fused`: the family has one module for queries, keys and values, and one
    for gate and up."""
    names = FUSED if fused else SEPARATE
    mlp = tuple(name for name in names if "mlp" in TARGETS[name][0].tensor)
    attention = tuple(name for name in names if name not in mlp)
    if model.mla is not None:
        attention = LATENT_ATTENTION if model.mla.q_lora_rank else ("q_proj", *LATENT_ATTENTION[2:])
    return (*attention, *(mlp if model.experts is None else EXPERTS))


class Adapter(NamedTuple):
    """A and B of a target, and the first row of its tensor that they add to."""

    first_row: int
    a: Tensor  # [rank, in], or of experts [experts, rank, in]
    b: Tensor  # [out, rank], or of experts [experts, out, rank]


def adapters_of(lora: LoraSpec, tensor: Tensor) -> list[Adapter]:
    """The adapters of a tensor of the base model.

    Where tp splits the outputs of a target it splits B, and where it splits the inputs, A; the other one is replicated.
    A is initialized like torch.nn.Linear, B with zeros.
    """
    return [
        _adapter(lora, tensor, name, target.segment)
        for name, places in TARGETS.items()
        for target in (places if name in lora.targets else ())
        if tensor.name.endswith(f".{target.tensor}")
    ]


def adapter_tensors(lora: LoraSpec, base: Iterable[Tensor]) -> list[Tensor]:
    """A and B for every target among the `base` tensors, in their order."""
    return [each for tensor in base for _, *pair in adapters_of(lora, tensor) for each in pair]


def _adapter(lora: LoraSpec, tensor: Tensor, target: str, number: int | None) -> Adapter:
    """The adapter of a target whose weight is a tensor, or segment `number` of its rows."""
    *experts, rows, inputs = tensor.shape
    first, outputs = 0, len(experts)  # a row; the dimension of rows
    by_ep = tuple(split for split in tensor.splits if split.axis == "ep")
    split_a = split_b = by_ep
    for split in (each for each in tensor.splits if each.axis == "tp"):
        if split.dim != outputs:
            split_a = (*by_ep, split)
            continue
        segments = split.segments if number is None else (split.segments[number],)
        first, rows = (sum(each.size for each in some) for some in (split.segments[: number or 0], segments))
        split_b = (*by_ep, Split("tp", outputs, segments))
    at, bound = f"{tensor.name.rpartition('.')[0]}.{target.rpartition('.')[2]}", 1 / math.sqrt(inputs)
    shape_a, shape_b = (*experts, lora.rank, inputs), (*experts, rows, lora.rank)
    a = Tensor(f"{at}.lora_A", shape_a, bound, split_a, tensor.experts, is_uniform=True)
    return Adapter(first, a, Tensor(f"{at}.lora_B", shape_b, 0.0, split_b, tensor.experts, constant=0.0))


def trained_tensors(model: ModelSpec, lora: LoraSpec | None) -> list[Tensor]:
    """The tensors of the model that are trained: the adapters, or without LoRA all of them."""
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
