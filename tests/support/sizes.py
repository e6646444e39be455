"""Sizes that a schedule allows, by its own word."""

from __future__ import annotations

from hypothesis import strategies as st

from pentad.schedules.catalogue import generate, spec_of
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.ir.program import Program


def allows(name: str, ranks: int, microbatches: int) -> bool:
    try:
        spec_of(name, ranks, microbatches)
    except PentadError:
        return False
    return True


def programs(name: str, ranks: int = 12, microbatches: int = 24) -> st.SearchStrategy[Program]:
    """Compute orders of at most so many ranks and microbatches."""
    sizes = [(p, m) for p in range(1, ranks + 1) for m in range(1, microbatches + 1) if allows(name, p, m)]
    return st.sampled_from(sizes).map(lambda size: generate(name, *size))
