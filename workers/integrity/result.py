"""What a rank reports in a search for flipped bits: plain data, no tensors."""

from __future__ import annotations

from typing import NamedTuple


class RankCheck(NamedTuple):
    """Digests by name; ranks that share a name should have the same digest.

    `state` has the digests of weights and optimizer state, `first` and `second` those of the results of one microbatch,
    which the rank has computed twice.
    """

    state: dict[str, int]
    first: dict[str, int]
    second: dict[str, int]
