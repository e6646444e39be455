"""Room for the tokens that expert ranks send to each other at once, where no host may wait for their numbers."""

from __future__ import annotations

import math

CAPACITY = 1.5  # room for so many times the tokens that even routing sends
LARGEST_SHARE = 0.75  # of a rank's tokens: with room for more, every rank gets all of them instead
GROWTH = 2  # how many times more room there is after a step that had too little
ALIGNMENT = 16  # tokens


def expert_slots(share: float, tokens: int, capacity: float | None) -> int:
    """Slots for the tokens, of so many, that a rank sends to another, which gets the `share` of them with even routing:
    `capacity` times as many; None: CAPACITY times, or 0 if that is more than LARGEST_SHARE of the tokens."""
    slots = math.ceil(tokens * share * (CAPACITY if capacity is None else capacity) / ALIGNMENT) * ALIGNMENT
    return 0 if capacity is None and slots > LARGEST_SHARE * tokens else min(tokens, slots)


def routed_share(num_experts: int, top_k: int, local: int) -> float:
    """The share of tokens that at least one of `local` experts gets, with even routing."""
    none = 1.0
    for drawn in range(top_k):
        none *= max(0, num_experts - local - drawn) / (num_experts - drawn)
    return 1 - none
