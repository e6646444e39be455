"""Digests of what a rank holds, under names that ranks share if, and only if, they hold the same."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch

from pentad.workers.checkpoint.manifest import piece_name
from pentad.workers.integrity.digest import digest
from pentad.workers.params.local_tensor import LocalTensor
from pentad.workers.params.parameters import Parameters
from pentad.workers.params.sharded_state import stored_name
from pentad.workers.params.weight_shard import WeightShard


def state_digests(weights: Iterable[WeightShard]) -> dict[str, torch.Tensor]:
    """Digests, tensor by tensor, of master weights, optimizer state and routing biases, of the weights in the compute
    dtype, and of those that LoRA freezes.

    The name for a ZeRO shard includes its elements, so that only its replicas, if any, share it.
    """
    return {name: digest(values) for each in weights for name, values in _named(each)}


def gathered_digests(shard: WeightShard, gathered: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Digests of the weights that a rank has gathered, by name."""
    return {f"weights.{stored_name(local)}": digest(gathered[local.name]) for local in shard.local_tensors}


def _named(shard: WeightShard) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(shard, Parameters):
        for kind, local, span, values in shard.state_parts():
            yield f"{kind}.{_part_name(local, span)}", values
    for name, bias in shard.router_bias.by_name.items():
        yield f"model.{name}", bias
    is_apart = not isinstance(shard, Parameters) or shard.is_apart
    if shard.layout.num_shards == 1 and is_apart:
        for local, span, values in shard.shard_parts(shard.compute):
            yield f"weights.{_part_name(local, span)}", values


def _part_name(local: LocalTensor, span: slice) -> str:
    return piece_name(stored_name(local), local.shape, span.start, span.stop)
