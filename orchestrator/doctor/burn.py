"""The burn: every GPU, or core, multiplies the same matrices; who is wrong or slow?"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from statistics import median

from pentad.orchestrator.doctor.finding import NO_GPU, Finding, ProbeError, Subject, Verdict, listed, probe
from pentad.orchestrator.gpus.table import GPUS
from pentad.orchestrator.planning.formatting import format_duration
from pentad.workers.health.burn import Burned

GPU_SECONDS = 30.0
SLOW = 0.92  # of the others' median rate: at least 8 % slower
STUCK = 0.35  # of its highest clock, or of the data sheet's rate: less than any power limit in use leaves
_WRONG = "take it out of use: it computes wrong results without an error"
_SLOW = "compare clocks, power and temperature (`nvidia-smi -q`); take it out of use, or reset its clocks (`-rgc`)"


def examine_burn(subject: Subject) -> Finding:
    if not subject.burn:
        return Finding("not applicable", "left out by --burn 0") if subject.gpus else NO_GPU
    if not subject.gpus and not hasattr(os, "sched_setaffinity"):
        return Finding("not applicable", "no GPU, and no core can be chosen on this system")
    device = "cuda" if subject.gpus else "cpu"
    try:
        rows = probe("burn", device, str(subject.burn), seconds=2 * subject.burn)
    except ProbeError as error:
        return Finding("failure", f"products of matrices failed: {error}", "look for XIDs in `dmesg`; reset the GPU")
    return judge_burn([Burned(**row) for row in rows], subject.burn)


def judge_burn(units: Sequence[Burned], seconds: float) -> Finding:
    """Of all units of this machine; those of one model are compared. Rates of cores are only figures: they share
    caches, power and often execution units."""
    if not units:
        return Finding("failure", "torch finds no GPU", "look at CUDA_VISIBLE_DEVICES and the driver")
    figures = {"units": [unit._asdict() for unit in units]}
    wrong, slow = _wrong(units), [text for unit in units if (text := _slowness(unit, units))]
    if wrong:
        return Finding("failure", "; ".join(wrong + slow), _WRONG, figures)
    if slow:
        return Finding("failure", "; ".join(slow), _SLOW, figures)
    low, high = (_flops(pick(unit.rate for unit in units)) for pick in (min, max))
    rate = f"{high} each" if low == high else f"{low} to {high}"
    products = sum(unit.products for unit in units)
    kind = units[0].unit.partition(" ")[0]
    who = f"{len(units)} {kind}s" if len(units) > 1 else units[0].unit
    text = f"{who}, {format_duration(seconds)}: {products:,} equal products, {rate}"
    return Finding("ok", text, figures=figures)


def _flops(rate: float) -> str:
    return f"{rate / 1e12:.3g} TFLOP/s" if rate >= 1e12 else f"{rate / 1e9:.3g} GFLOP/s"


def _wrong(units: Sequence[Burned]) -> list[str]:
    texts = []
    for unit in units:
        if unit.error > 1:
            texts.append(f"{unit.unit} computes wrong: {unit.error:.3g} times the rounding error that is possible")
        elif unit.differing:
            texts.append(f"{unit.unit} computes wrong: {unit.differing} of {unit.products} products differ")
    known = {text.partition(" computes")[0] for text in texts}
    for model in dict.fromkeys(unit.model for unit in units):
        peers = [unit for unit in units if unit.model == model]
        (usual, number), *_ = Counter(unit.digest for unit in peers).most_common()
        odd = [unit.unit for unit in peers if unit.digest != usual and unit.unit not in known]
        if odd and 2 * number > len(peers):
            texts.append(f"{listed(odd)} computes wrong: other bits than {number} others")
        elif odd and not known & {unit.unit for unit in peers}:
            texts.append(f"one of {listed([unit.unit for unit in peers])} computes wrong: their bits differ")
    return texts


def _slowness(unit: Burned, units: Sequence[Burned]) -> str:
    """Why a unit is slow, with the evidence; '' if it is not."""
    if unit.unit.startswith("CPU"):
        return ""
    others = [each.rate for each in units if each is not unit and each.model == unit.model]
    clock = "" if unit.clock is None else f" at {unit.clock / 1e6:,.0f} MHz"
    why = f"{clock}, throttled ({listed(unit.throttles)})" if unit.throttles else clock
    if others and unit.rate < SLOW * median(others):
        return f"{unit.unit} is {1 - unit.rate / median(others):.0%} slower than its peers{why}"
    sheet = GPUS.get(unit.model)
    if sheet and unit.rate < STUCK * sheet.bf16:
        return f"{unit.unit} attains {unit.rate / sheet.bf16:.0%} of its data sheet's rate{why}"
    if unit.clock and unit.clock_most and unit.clock < STUCK * unit.clock_most:
        return f"{unit.unit} is stuck{clock} of {unit.clock_most / 1e6:,.0f} under load"
    return ""


def compare_nodes(rates: dict[str, Sequence[Burned]]) -> dict[str, tuple[Verdict, str]]:
    """Nodes whose units are slower, or have other bits, than units of the same model on the other nodes."""
    found: dict[str, tuple[Verdict, str]] = {}
    for model in {unit.model for units in rates.values() for unit in units}:
        of_model = {node: [unit for unit in units if unit.model == model] for node, units in rates.items()}
        of_model = {node: units for node, units in of_model.items() if units}
        digests = Counter(unit.digest for units in of_model.values() for unit in units)
        usual, number = digests.most_common(1)[0]
        for node, units in of_model.items():
            others = [unit.rate for name, each in of_model.items() if name != node for unit in each]
            odd = [unit.unit for unit in units if unit.digest != usual]
            slow = [unit.unit for unit in units if others and unit.rate < SLOW * median(others)]
            if odd and model and 2 * number > digests.total():
                found[node] = ("failure", f"{listed(odd)}: other bits than the same GPUs on other nodes")
            elif slow:
                verdict: Verdict = "failure" if model else "warning"
                found[node] = (verdict, f"{listed(slow)}: at least 8 % slower than the median of other nodes")
    return found
