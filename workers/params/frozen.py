"""Frozen weights: a rank's parts of the tensors that LoRA does not train, in the dtype of compute alone."""

from __future__ import annotations

import torch

from pentad.schedules.spec.plan import ParamShard, Plan
from pentad.workers.checkpoint.lora_base import open_base
from pentad.workers.params.local_tensor import local_tensors
from pentad.workers.params.param_init import initial_values
from pentad.workers.params.parameters import DTYPES
from pentad.workers.params.sharded_state import read_full

FrozenWeights = dict[ParamShard, dict[str, torch.Tensor]]  # by shard and name


def frozen_weights(
    plan: Plan, rank: int, device: torch.device, earlier: tuple[Plan, FrozenWeights] | None = None
) -> FrozenWeights:
    """The frozen weights of a rank: those that it had under an `earlier` plan, else read from the plan's checkpoint,
    one tensor at a time, or the initial values.

    Raises PentadError if the checkpoint is damaged, or a tensor is missing or has another shape.
    """
    found: FrozenWeights = {}
    if earlier is not None and earlier[0].lora == plan.lora:
        before, held = earlier
        shards = (shard for shard in plan.frozen_shards_of(rank) if shard in held)
        found = {each: held[each] for each in shards if local_tensors(plan, each) == local_tensors(before, each)}
    missing = [shard for shard in plan.frozen_shards_of(rank) if shard not in found]
    if plan.lora is None or not missing:
        return found
    source = None if plan.lora.base is None else open_base(plan.lora.base)
    for shard in missing:
        found[shard] = weights = {}
        for local in local_tensors(plan, shard):
            if source is None:
                values = initial_values(local.tensor, plan.seed, local.ranges, device)
            else:
                name = local.tensor.tied_to or local.name
                values = local.slice_of(read_full(source, f"model.{name}", local.tensor.shape))
            weights[local.name] = values.to(device, DTYPES[plan.dtype], copy=True)
    return found
