"""The burn-in: every GPU, or core, multiplies the same matrices, which shows those that are wrong or slow."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import median_high
from typing import NamedTuple

from pentad.orchestrator.doctor.finding import Finding, Subject, spanned
from pentad.orchestrator.doctor.probe import ProbeError, probe
from pentad.orchestrator.gpus.table import GPUS
from pentad.orchestrator.planning.formatting import format_duration
from pentad.schedules.ir.errors import enumerated
from pentad.workers.health.results import Burned

GPU_SECONDS = 30.0
SLOW = 0.92  # share of the median rate below which a GPU is slow
STUCK = 0.35  # share of its highest clock, or of the data sheet's rate; power limits in use leave more than that
_WRONG = "take it out of use: it computes wrong results without an error"
_SLOW = "compare clocks, power and temperature (`nvidia-smi -q`); take it out of use, or reset its clocks (`-rgc`)"


class Norm(NamedTuple):
    """What is normal for the `total` units of one model that are not wrong by themselves: their (upper) median rate,
    and the most frequent digest of their results, which `same` of them have."""

    rate: float
    digest: str
    same: int
    total: int


def examine_burn(subject: Subject) -> Finding:
    if not subject.burn:
        return Finding("not applicable", "left out by --burn 0" if subject.gpus else "no GPU")
    if not subject.gpus and not hasattr(os, "sched_setaffinity"):
        return Finding("not applicable", "no GPU, and no core can be chosen on this system")
    device = "cuda" if subject.gpus else "cpu"
    try:
        rows = probe("burn", device, subject.burn, seconds=2 * subject.burn)
    except ProbeError as error:
        return Finding("failure", f"products of matrices failed: {error}", "look for XIDs in `dmesg`; reset the GPU")
    units = [Burned(**row) for row in rows]
    return judge_burn(units, subject.burn, norms(units))


def norms(units: Sequence[Burned]) -> dict[str, Norm]:
    """The norm of each model."""
    found = {}
    for model in {unit.model for unit in units}:
        peers = [unit for unit in units if unit.model == model and not _own_fault(unit)]
        if peers:
            (digest, same), *_ = Counter(unit.digest for unit in peers).most_common()
            found[model] = Norm(median_high(unit.rate for unit in peers), digest, same, len(peers))
    return found


def judge_burn(units: Sequence[Burned], seconds: float, norms: Mapping[str, Norm]) -> Finding:
    """Judges all units of a machine by the norm of their model."""
    if not units:
        return Finding("failure", "torch finds no GPU", "look at CUDA_VISIBLE_DEVICES and the driver")
    figures = {"seconds": seconds, "units": [unit._asdict() for unit in units]}
    wrong = [text for unit in units if (text := _own_fault(unit) or _other_bits(unit, norms[unit.model]))]
    slow = [text for unit in units if (text := _slowness(unit, norms.get(unit.model)))]
    if wrong or slow:
        return Finding("failure", "; ".join(wrong + slow), _WRONG if wrong else _SLOW, figures)
    who = f"{len(units)} {units[0].unit.split()[0]}s" if len(units) > 1 else units[0].unit
    products = sum(unit.products for unit in units)
    return Finding(
        "ok", f"{who}, {format_duration(seconds)}: {products:,} equal products, {_rates(units)}", figures=figures
    )


def _rates(units: Sequence[Burned]) -> str:
    scale, name = (1e9, "GFLOP/s") if units[0].unit.startswith("CPU") else (1e12, "TFLOP/s")
    return spanned([unit.rate / scale for unit in units], name) + " each" * (len(units) > 1)


def _own_fault(unit: Burned) -> str:
    """How a unit is wrong even without comparison to others; '' if it is not."""
    if unit.error > 1:
        return f"{unit.unit} computes wrong results: {unit.error:.3g} times the possible rounding error"
    if unit.differing:
        return f"{unit.unit} computes wrong results: {unit.differing} of {unit.products} products differ"
    return ""


def _other_bits(unit: Burned, norm: Norm) -> str:
    if norm.same == norm.total or (unit.digest == norm.digest and 2 * norm.same > norm.total):
        return ""
    if 2 * norm.same > norm.total:
        return f"{unit.unit} computes wrong results: other bits than {norm.same} of {norm.total}"
    return f"{unit.unit} or one of its peers computes wrong results: their bits differ, with no majority"


def _slowness(unit: Burned, norm: Norm | None) -> str:
    """How a GPU is slow, with the evidence; '' if it is not. Cores are not judged, because they share caches, power and
    often execution units."""
    if unit.unit.startswith("CPU") or norm is None:
        return ""
    clock = "" if unit.clock is None else f" at {unit.clock / 1e6:,.0f} MHz"
    why = f"{clock}, throttled ({enumerated(unit.throttles)})" if unit.throttles else clock
    if unit.rate < SLOW * norm.rate:
        return f"{unit.unit} is {1 - unit.rate / norm.rate:.0%} slower than its peers{why}"
    sheet = GPUS.get(unit.model)
    if sheet and unit.rate < STUCK * sheet.bf16:
        return f"{unit.unit} attains {unit.rate / sheet.bf16:.0%} of its data sheet's rate{why}"
    if unit.clock and unit.clock_most and unit.clock < STUCK * unit.clock_most:
        return f"{unit.unit} is stuck{clock} of {unit.clock_most / 1e6:,.0f} under load"
    return ""
