"""The weights of one parameter shard on a rank: a flat buffer, sharded by ZeRO, and the tensors in it by name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from pentad.kernels.fp8.fp8_tensor import E4M3
from pentad.schedules.spec.zero_layout import ZeroLayout
from pentad.workers.params.local_tensor import LocalTensor
from pentad.workers.params.router_bias import RouterBias
from pentad.workers.params.update_layout import spans


@dataclass(frozen=True)
class WeightShard:
    """`compute` [compute_part] is this rank's ZeRO shard of the weights ([size] without ZeRO), in the order of
    `local_tensors` and in the compute dtype, except for those that are gathered in 8 bits. It is a view of
    `full_weights` [padded_size], which is None if stages share buffers (workers/runtime/zero.py). `router_bias` is not
    sharded; it belongs to the weights other than experts, as every rank of the stage needs it."""

    local_tensors: tuple[LocalTensor, ...]
    layout: ZeroLayout
    compute: torch.Tensor
    full_weights: torch.Tensor | None
    router_bias: RouterBias

    def spans(self) -> Iterator[tuple[LocalTensor, int, int]]:
        """The local tensors, each with its start and end among all of them, without padding."""
        return spans(self.local_tensors)

    def views(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """The local tensors in a full buffer, by name."""
        flat, found = flat.view(-1), dict[str, torch.Tensor]()
        for local, start, _ in self.spans():
            place = self.layout.place(start)
            found[local.name] = flat[place : place + local.size].view(local.shape)
        return found

    def weight_views(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """The local tensors in full weights [gathered_size], by name; some may be in 8 bits."""
        plain, narrow = self.gathered_parts(flat)
        border, found = self.layout.size - self.layout.in_8_bits, dict[str, torch.Tensor]()
        for local, start, end in self.spans():
            values = plain[start:end] if start < border else narrow.view(E4M3)[start - border : end - border]
            found[local.name] = values.view(local.shape)
        return found

    def gathered_parts(self, flat: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of full weights [gathered_size]: those in the compute dtype, and the bytes of those in 8 bits."""
        border = self.layout.num_shards * self.layout.compute_part
        return flat[:border], flat[border:].view(torch.uint8)

    def shard_spans(self) -> Iterator[tuple[LocalTensor, slice, slice]]:
        """For each tensor with elements in the shard: where they are, and which elements of the tensor they are."""
        for local, start, end in self.spans():
            for index, span in self.layout.overlap(start, end):
                yield local, index, span

    def shard_parts(self, shard: torch.Tensor) -> Iterator[tuple[LocalTensor, slice, torch.Tensor]]:
        """The tensors in a ZeRO shard: each tensor, which of its elements in C order, and their values."""
        return ((local, span, shard[index]) for local, index, span in self.shard_spans())


def shard_of(layout: ZeroLayout, full: torch.Tensor) -> torch.Tensor:
    """The shard [part], a view of a full buffer [padded_size]."""
    return full.view(layout.num_shards, layout.part)[layout.shard_index]
