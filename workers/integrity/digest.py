"""A digest of a tensor's bits that is the same on any device and for any order of addition."""

from __future__ import annotations

import torch

PIECE = 2**20  # elements: 24 MiB of scratch memory
ODD = 0x1E3779B97F4A7C15  # any odd number with set bits spread over all of it
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by size in bytes


def digest(values: torch.Tensor) -> torch.Tensor:
    """The sum, modulo 2^64, of each element's bits as an integer times an odd weight for its position; an int64 scalar
    on the device of `values`.

    A change of one element always changes the digest, since no multiple of an odd number by less than 2^64 is divisible
    by 2^64; changes of several do unless they cancel exactly. Integer sums do not depend on their order.
    """
    flat = values.detach().contiguous().view(-1)
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    weights = torch.arange(min(PIECE, flat.numel()), device=values.device).mul_(2).add_(1).mul_(ODD)
    for number, piece in enumerate(flat.split(PIECE)):
        wide = piece.view(INTEGERS[values.element_size()]).long()
        # All weights of a later piece are larger by the same amount.
        total += _signed(2 * number * PIECE * ODD) * wide.sum() + wide.mul(weights[: len(wide)]).sum()
    return total


def read(digests: dict[str, torch.Tensor]) -> dict[str, int]:
    """The digests on the host, with one wait for each device."""
    found: dict[str, int] = {}
    for device in {each.device for each in digests.values()}:
        names = [name for name, each in digests.items() if each.device == device]
        found |= zip(names, torch.stack([digests[name] for name in names]).tolist(), strict=True)
    return found


def _signed(number: int) -> int:
    """The number modulo 2^64, as an int64."""
    return (number + 2**63) % 2**64 - 2**63
