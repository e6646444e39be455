"""The weights of one parameter shard on a rank: a flat buffer, cut by ZeRO, and the tensors in it by name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from pentad.schedules.spec.zero_layout import ZeroLayout
from pentad.workers.params.local_tensor import LocalTensor
from pentad.workers.params.router_bias import RouterBias
from pentad.workers.params.update_layout import spans


@dataclass(frozen=True)
class WeightShard:
    """`compute` [part] is this rank's ZeRO shard of the weights ([size] without ZeRO), in the order of
    `local_tensors` and in the dtype of compute. `full_weights` [padded_size], of which it is a view, is None where
    stages share buffers (workers/runtime/zero.py). `router_bias` is not sharded; it comes with the weights that are not
    experts', as every rank of the stage needs it.
    """

    local_tensors: tuple[LocalTensor, ...]
    layout: ZeroLayout
    compute: torch.Tensor
    full_weights: torch.Tensor | None
    router_bias: RouterBias

    def spans(self) -> Iterator[tuple[LocalTensor, int, int]]:
        """The local tensors with where each starts and ends in a full buffer."""
        return spans(self.local_tensors)

    def views(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """The local tensors in a full buffer, by name."""
        flat = flat.view(-1)
        return {local.name: flat[start:end].view(local.shape) for local, start, end in self.spans()}

    def shard_spans(self) -> Iterator[tuple[LocalTensor, slice, slice]]:
        """For each tensor with elements in the shard: where they are, and which elements of the tensor."""
        for local, start, end in self.spans():
            for index, span in self.layout.overlap(start, end):
                yield local, index, span

    def shard_parts(self, shard: torch.Tensor) -> Iterator[tuple[LocalTensor, slice, torch.Tensor]]:
        """The elements of tensors that a ZeRO shard holds: a tensor, which of its elements in C order, their values."""
        return ((local, span, shard[index]) for local, index, span in self.shard_spans())


def shard_of(layout: ZeroLayout, full: torch.Tensor) -> torch.Tensor:
    """The shard [part], a view of a full buffer [padded_size]."""
    return full.view(layout.num_shards, layout.part)[layout.shard_index]
