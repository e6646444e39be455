"""The values that parameters begin with: a function of the run's seed, the tensor's name and the element's place.

Integers are hashed and added up, and the sum is scaled once: the bits are the same on every device, and any part
of a tensor is made without the rest. A sum of eight uniform numbers is as good as normal here: its density differs by
less than 0.01 anywhere, and it ends at 4.9 standard deviations.
"""

from __future__ import annotations

import hashlib
import math

import torch

from pentad.schedules.spec.tensors import Range, Tensor

CHUNK = 2**24  # elements made at once
HALVES = 8  # numbers of 16 bits added up
_SPREAD = math.sqrt(HALVES * (2**32 - 1) / 12)  # standard deviation of their sum


def initial_values(
    tensor: Tensor, seed: int, ranges: list[list[Range]] | None = None, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """float32, of those elements whose place is in `ranges` of every dimension; of all, if none are given."""
    ranges = ranges or [[(0, size)] for size in tensor.shape]
    places = [torch.cat([torch.arange(*each, device=device) for each in dim]) for dim in ranges]
    if tensor.scale == 0.0:
        return torch.ones([len(dim) for dim in places], device=device)
    digest = hashlib.blake2b(f"{seed}:{tensor.like or tensor.name}".encode(), digest_size=7).digest()
    rest = torch.zeros(1, dtype=torch.int64, device=device)
    for dim, size in zip(places[1:], tensor.shape[1:], strict=True):
        rest = (rest[:, None] * size + dim).flatten()
    row = math.prod(tensor.shape[1:])
    step = max(1, CHUNK // max(1, len(rest)))
    made = torch.empty(len(places[0]), len(rest), device=device)
    for some, values in zip(places[0].split(step), made.split(step), strict=True):
        values.copy_(_spread(some[:, None] * row + rest, int.from_bytes(digest, "little"), tensor.scale))
    return made.view([len(dim) for dim in places])


def _spread(index: torch.Tensor, key: int, scale: float) -> torch.Tensor:
    total = torch.zeros_like(index)
    for number in range(HALVES // 4):
        mixed = _mix(index * (HALVES // 4) + number + key)
        for half in range(4):
            total += (mixed >> 16 * half) & 0xFFFF
    return (total - HALVES * (2**16 - 1) // 2).float() * (scale / _SPREAD)


def _mix(x: torch.Tensor) -> torch.Tensor:
    """The finaliser of SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", 2014), of
    64 bits that wrap around."""
    x = x * _signed(0x9E3779B97F4A7C15)
    x = (x ^ _shifted(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shifted(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shifted(x, 31)


def _shifted(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Without the sign that torch shifts in."""
    return (x >> bits) & (2 ** (64 - bits) - 1)


def _signed(x: int) -> int:
    return x - 2**64 if x >= 2**63 else x
