"""Counts how well the operands of products fit into 8 bits, while they are multiplied, in the steps that are sampled.

A sample costs a pass over each operand that F and B multiply. Shares and maxima do not depend on the mesh: ranks with
the same operand count the same, ranks with parts of one count parts of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from pentad.kernels.fp8.fp8_tensor import Fp8Tensor, Role
from pentad.workers.linear.fp8_sample import Fp8Sample, Key

CHUNK = 2**24  # values inspected at once, which bounds the memory of a sample
# The bits of the largest finite number, without the sign.
LARGEST = {torch.float8_e4m3fn: 0x7E, torch.float8_e5m2: 0x7B}


class Fp8Samples:
    """The counts of a step, on the device."""

    def __init__(self) -> None:
        self._found: dict[Key, Tensor] = {}  # [4] float64

    def add(self, weight: str, role: Role, operand: Fp8Tensor) -> None:
        if role == "weight" and (weight, role) in self._found:
            return  # it stays the same within a step
        counts = counts_of(operand)
        before = self._found.get((weight, role))
        if before is not None:
            counts[0] = torch.maximum(before[0], counts[0])
            counts[1:] += before[1:]
        self._found[weight, role] = counts

    def replace_maxima(self, maxima: Mapping[Key, Tensor]) -> None:
        """Replaces the maxima by the largest of these, recorded before casts that may have saturated."""
        for key, counts in self._found.items():
            if key in maxima:
                counts[0] = torch.where(counts[0].isnan(), counts[0], maxima[key].amax())

    def take(self) -> PendingSamples:
        """The counts so far, as copies on the host."""
        if not self._found:
            return PendingSamples((), None)
        stacked = torch.stack(list(self._found.values()))
        host = torch.empty(stacked.shape, dtype=stacked.dtype, pin_memory=stacked.is_cuda)
        return PendingSamples(tuple(self._found), host.copy_(stacked, non_blocking=True))


class PendingSamples(NamedTuple):
    """Valid once the stream that was current at `take` has reached that point."""

    keys: tuple[Key, ...]
    counts: Tensor | None

    def read(self) -> tuple[Fp8Sample, ...]:
        rows = [] if self.counts is None else self.counts.tolist()
        return tuple(
            Fp8Sample(*key, amax, *map(int, counts)) for key, (amax, *counts) in zip(self.keys, rows, strict=True)
        )


def counts_of(operand: Fp8Tensor) -> Tensor:
    """[amax, saturated, underflowed, values], float64, on the operand's device."""
    values, scales = operand
    (m, k), (down, across) = values.shape, scales.shape
    total = torch.zeros(4, dtype=torch.float64, device=values.device)
    size = max(1, CHUNK // k)  # rows
    for part, rows in zip(values.split(size), torch.arange(m, device=values.device).split(size), strict=True):
        bits = part.view(torch.uint8) & 0x7F
        largest = bits.view(len(rows), across, -1).amax(2).view(values.dtype).double()
        total[0] = torch.maximum(total[0], (largest * scales[rows // (m // down)]).amax())
        total[1] += (bits == LARGEST[values.dtype]).sum()
        total[2] += (bits == 0).sum()
    total[3] = m * k
    return total
