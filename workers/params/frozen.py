"""Frozen weights: a rank's parts of the tensors that LoRA does not train, kept only in the compute dtype, and routing
biases, which are never rounded."""

from __future__ import annotations

import torch

from pentad.kernels.optimizer.param_remainders import nearest
from pentad.schedules.spec.plan import ParamShard, Plan
from pentad.schedules.spec.zero_layout import zero_layout
from pentad.workers.checkpoint.checkpoint import Checkpoint
from pentad.workers.checkpoint.lora_base import open_base
from pentad.workers.params.local_tensor import local_tensors
from pentad.workers.params.param_init import initial_values
from pentad.workers.params.parameters import DTYPES
from pentad.workers.params.router_bias import router_biases
from pentad.workers.params.sharded_state import read_full
from pentad.workers.params.weight_shard import WeightShard, shard_of

FrozenWeights = dict[ParamShard, WeightShard]


def frozen_weights(
    plan: Plan, rank: int, device: torch.device, earlier: tuple[Plan, FrozenWeights] | None = None
) -> FrozenWeights:
    """The frozen weights of a rank: those that it had under an `earlier` plan, else those of the plan's checkpoint,
    read one tensor at a time, or the initial values.

    Raises PentadError if the checkpoint is damaged, or a tensor is missing or has another shape.
    """
    held = earlier[1] if earlier is not None and earlier[0].lora == plan.lora else {}
    found = {shard: _allocate(plan, shard, rank, held.get(shard), device) for shard in plan.frozen_shards_of(rank)}
    missing = [weights for shard, weights in found.items() if weights is not held.get(shard)]
    if plan.lora is None or not missing:
        return found
    source = None if plan.lora.base is None else open_base(plan.lora.base)
    for weights in missing:
        _fill(weights, plan, source)
    return found


def _allocate(plan: Plan, shard: ParamShard, rank: int, held: WeightShard | None, device: torch.device) -> WeightShard:
    """The `held` weights if they are the same part of the same tensors, otherwise zeros."""
    layout, local, narrow = zero_layout(plan, shard, rank), local_tensors(plan, shard), DTYPES[plan.dtype]
    if held is not None and (held.layout, held.local_tensors) == (layout, local):
        return held
    if layout.num_shards > 1:
        full, compute = None, torch.zeros(layout.part, dtype=narrow, device=device)
    else:
        full = torch.zeros(layout.padded_size, dtype=narrow, device=device)
        compute = shard_of(layout, full)
    bias = router_biases(plan, shard, torch.promote_types(narrow, torch.float32), device)
    return WeightShard(local, layout, compute, full, bias)


def _fill(weights: WeightShard, plan: Plan, source: Checkpoint | None) -> None:
    for local, span, values in weights.shard_parts(weights.compute):
        if source is None:
            value = initial_values(local.tensor, plan.seed, local.ranges, values.device)
        else:
            name = local.tensor.tied_to or local.name
            value = local.slice_of(read_full(source, f"model.{name}", local.tensor.shape))
        values.copy_(nearest(value.flatten()[span], values.dtype))
    if source is None:
        return
    for name, bias in weights.router_bias.by_name.items():
        bias.copy_(read_full(source, f"model.{name}", tuple(bias.shape)))
