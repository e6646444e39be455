"""Initial parameter values: a function of the run's seed, the tensor's name and the element's position.

Hashed integers are summed and scaled once, so the bits are the same on every device, and any part of a tensor can be
computed without the rest. A sum of eight uniform numbers is close enough to a normal one: its density differs by less
than 0.01 everywhere, and it is bounded by 4.9 standard deviations.
"""

from __future__ import annotations

import hashlib
import math

import torch

from pentad.schedules.spec.tensors import Range, Tensor

CHUNK = 2**24  # elements computed at once
SUMMANDS = 8  # 16-bit numbers per value, four from each hash
_STD = math.sqrt(SUMMANDS * (2**32 - 1) / 12)  # of their sum


def initial_values(
    tensor: Tensor, seed: int, ranges: list[list[Range]] | None = None, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """float32 values of the elements whose indices lie in `ranges` of every dimension; of all elements by default."""
    ranges = ranges or [[(0, size)] for size in tensor.shape]
    indices = [torch.cat([torch.arange(*each, device=device) for each in dim]) for dim in ranges]
    if tensor.scale == 0.0:
        return torch.full([len(dim) for dim in indices], tensor.constant, device=device)
    key = derive_seed(seed, tensor.tied_to or tensor.name)
    inner = torch.zeros(1, dtype=torch.int64, device=device)  # position in a row
    for dim, size in zip(indices[1:], tensor.shape[1:], strict=True):
        inner = (inner[:, None] * size + dim).flatten()
    row_size = math.prod(tensor.shape[1:])
    rows = max(1, CHUNK // max(1, len(inner)))
    values = torch.empty(len(indices[0]), len(inner), device=device)
    for row, chunk in zip(indices[0].split(rows), values.split(rows), strict=True):
        make = _uniform if tensor.is_uniform else _normal
        chunk.copy_(make(row[:, None] * row_size + inner, key, tensor.scale))
    return values.view([len(dim) for dim in indices])


def derive_seed(seed: int, *purpose: object) -> int:
    """A seed for one purpose, the same on every mesh."""
    text = ":".join(map(str, (seed, *purpose)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little")


def _normal(position: torch.Tensor, key: int, scale: float) -> torch.Tensor:
    total = torch.zeros_like(position)
    for number in range(SUMMANDS // 4):
        mixed = _mix(position * (SUMMANDS // 4) + number + key)
        for quarter in range(4):
            total += (mixed >> 16 * quarter) & 0xFFFF
    return (total - SUMMANDS * (2**16 - 1) // 2).float() * (scale / _STD)


def _uniform(position: torch.Tensor, key: int, bound: float) -> torch.Tensor:
    """The midpoints of 2^24 equal parts of -bound to bound, which float32 can tell apart."""
    return ((_logical_shift(_mix(position + key), 40) * 2 + 1 - 2**24).double() * (bound / 2**24)).float()


def _mix(x: torch.Tensor) -> torch.Tensor:
    """The finalizer of SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", 2014), in
    64-bit arithmetic that wraps around."""
    x = x * _signed(0x9E3779B97F4A7C15)
    x = (x ^ _logical_shift(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _logical_shift(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _logical_shift(x, 31)


def _logical_shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    """A right shift that shifts in zeros, where torch would shift in the sign."""
    return (x >> bits) & (2 ** (64 - bits) - 1)


def _signed(x: int) -> int:
    return x - 2**64 if x >= 2**63 else x
