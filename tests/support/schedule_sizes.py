"""Schedules by name, and the sizes that they support."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import strategies as st

from pentad.schedules.catalogue import CATALOGUE, generate, spec_of
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.ir.program import Program


def allows(name: str, ranks: int, microbatches: int) -> bool:
    try:
        spec_of(name, ranks, microbatches)
    except PentadError:
        return False
    return True


def programs(name: str, ranks: int = 12, microbatches: int = 24) -> st.SearchStrategy[Program]:
    """Compute orders for up to `ranks` ranks and `microbatches` microbatches."""
    sizes = [(p, m) for p in range(1, ranks + 1) for m in range(1, microbatches + 1) if allows(name, p, m)]
    return st.sampled_from(sizes).map(lambda size: generate(name, *size))


# One schedule per feature: fused BW, chunks, split W, V placement, two directions with overlapped pairs, slices.
TYPICAL = ("1f1b", "interleaved", "zb-h2", "zb-v", "dualpipe", "seq-1f1b")
NAMES: list[Any] = [name if name in TYPICAL else pytest.param(name, marks=pytest.mark.slow) for name in CATALOGUE]
