"""What a run evaluates besides training, as plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from pentad.schedules.ir.program import Program

HOLDOUT = "holdout"  # name of the data set that is held out from the training data


class EvalData(NamedTuple):
    """A data set: the corpus `data`, a path as in SourceSpec, or only its end, the share `holdout` of its tokens.
    `fingerprint` identifies the corpus."""

    name: str
    data: str
    holdout: float = 0.0
    fingerprint: str = ""


@dataclass(frozen=True)
class EvalSpec:
    """`program` is forward-only, with the placement and the microbatches of the plan's program. It reads the first
    `sequences` sequences of every data set (None: all)."""

    program: Program
    data_sets: tuple[EvalData, ...]
    sequences: int | None
