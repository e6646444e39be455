"""Compares the gradients of a step in 8 bits with those of the same step in the compute dtype."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from pentad.schedules.spec.plan import ParamShard, Plan
from pentad.schedules.spec.zero_layout import replicas
from pentad.workers.linear.fp8_sample import GradientSums
from pentad.workers.params.param_buffers import ParamBuffers

CHUNK = 2**24  # elements compared at once, which bounds the memory


class PendingSums(NamedTuple):
    """Valid once the stream that was current at `compared` has reached that point."""

    weights: tuple[str, ...]
    sums: Tensor  # [weights, 3], on the host

    def read(self) -> tuple[GradientSums, ...]:
        return tuple(GradientSums(name, *row) for name, row in zip(self.weights, self.sums.tolist(), strict=True))


class KeptGradients:
    """This rank's share of the complete gradients of a step in the compute dtype, kept in host memory."""

    def __init__(self, plan: Plan, rank: int, buffers: Mapping[ParamShard, ParamBuffers]) -> None:
        self.plan, self.rank, self.buffers = plan, rank, buffers
        self.kept = [gradient.to("cpu", copy=True) for _, gradient in self._counted()]

    def compared(self) -> PendingSums:
        """Compares with the current gradients, which are complete, too."""
        names, rows = list[str](), list[Tensor]()
        for (name, gradient), kept in zip(self._counted(), self.kept, strict=True):
            names.append(name)
            rows.append(_sums(gradient, kept))
        stacked = torch.stack(rows) if rows else torch.zeros(0, 3, dtype=torch.float64)
        host = torch.empty(stacked.shape, dtype=stacked.dtype, pin_memory=stacked.is_cuda)
        return PendingSums(tuple(names), host.copy_(stacked, non_blocking=True))

    def _counted(self) -> Iterator[tuple[str, Tensor]]:
        """The parts of gradients that no other rank counts, as in the gradient norm, each with its weight's name."""
        for shard, buffers in self.buffers.items():
            parameters = buffers.parameters
            if replicas(self.plan, shard, self.rank)[0] != self.rank:
                continue
            for local, index, _ in parameters.shard_spans():
                for counted in buffers.replicated.counted:
                    start, stop = max(index.start, counted.start), min(index.stop, counted.stop)
                    if start < stop:
                        yield local.name, parameters.gradient[start:stop]


def _sums(gradient: Tensor, kept: Tensor) -> Tensor:
    """[3], as in GradientSums, float64."""
    total = torch.zeros(3, dtype=torch.float64, device=gradient.device)
    for part, other in zip(gradient.split(CHUNK), kept.split(CHUNK), strict=True):
        found, expected = part.double(), other.to(part.device).double()
        total += torch.stack((found.dot(expected), found.dot(found), expected.dot(expected)))
    return total
