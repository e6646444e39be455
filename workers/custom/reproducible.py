"""Somebody else's layers on a GPU, so that two runs have the same bits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.nn.attention import SDPBackend, sdpa_kernel

from pentad.kernels.attention import attention_partial

# Flash attention takes 16-bit dtypes; what it refuses goes to plain GEMMs, which always add in the same order.
REPRODUCIBLE = [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]


@contextmanager
def reproducible() -> Iterator[None]:
    """Asks torch for reproducible algorithms, also of attention; where it has none for an operation it warns."""
    with attention_partial.reproducible("warn"), sdpa_kernel(REPRODUCIBLE, set_priority=True):
        yield
