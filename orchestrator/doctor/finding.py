"""The finding of a check, and what a check examines."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, NamedTuple

from pentad.orchestrator.config.config import RunConfig
from pentad.schedules.ir.errors import enumerated
from pentad.workers.health.gpu_facts import GpuFacts

Verdict = Literal["ok", "warning", "failure", "not applicable"]


class Finding(NamedTuple):
    """A sentence without a full stop, the remedy for a warning or failure, and measured `figures` for `--json` and for
    comparisons between nodes."""

    verdict: Verdict
    text: str
    remedy: str = ""
    figures: Mapping[str, Any] = {}


class Subject(NamedTuple):
    """What is examined: the machine of this process, for a configuration. `burn` is the length of the burn-in in
    seconds (0: none), `gpus` are the GPUs that this process may use."""

    config: RunConfig
    gpus: tuple[GpuFacts, ...]
    burn: float


class Check(NamedTuple):
    """A check. `seconds` returns how long it takes, if that is long."""

    name: str
    examine: Callable[[Subject], Finding]
    seconds: Callable[[Subject], float] = lambda _: 0.0
    needs_gpus: bool = False

    def run(self, subject: Subject) -> Finding:
        if self.needs_gpus and not subject.gpus:
            return Finding("not applicable", "no GPU")
        return self.examine(subject)


class FindingRow(NamedTuple):
    """A check's finding; `node` is the name of a cluster's node, '' for this machine or the whole cluster."""

    check: str
    finding: Finding
    node: str = ""


# A context for a check, given its name and how many seconds it takes.
UnderWay = Callable[[str, float], AbstractContextManager[None]]


def worst(verdicts: Sequence[Verdict]) -> Verdict:
    order: tuple[Verdict, ...] = ("failure", "warning", "ok")
    return next((each for each in order if each in verdicts), "not applicable")


def spanned(values: Sequence[float], unit: str) -> str:
    """The range of values, such as '655 to 660 TFLOP/s' or '660 TFLOP/s'."""
    low, high = f"{min(values):.3g}", f"{max(values):.3g}"
    return f"{low} to {high} {unit}" if low != high else f"{high} {unit}"


def gpus_named(indices: Sequence[int]) -> str:
    """The GPUs by name, such as 'GPU 3' or 'GPUs 0, 2 and 3'."""
    return f"GPU{'s' * (len(indices) > 1)} {enumerated(indices)}"
