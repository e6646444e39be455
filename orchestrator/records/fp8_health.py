"""How well operands fit into FP8: what a sampled step adds to metrics.jsonl, and when to warn."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterable
from statistics import median
from typing import Any

from pentad.workers.linear.fp8_sample import Fp8Sample, GradientSums, cosines, merged

MOST = 3  # most sentences about a step
UNDERFLOWED = 0.25  # share of an operand's values that become zero in FP8, above which to warn
SATURATED = 0.05  # the same for the largest magnitude; a sound attention output, scaled by tiles, had a share of 3 %
COSINE = 0.9  # least cosine between a gradient and that in the compute dtype
# Growth of a maximum over the median of the last REMEMBERED samples, of which there must be LEAST.
GROWTH, REMEMBERED, LEAST = 16.0, 16, 4


def fp8_row(samples: Iterable[Fp8Sample]) -> dict[str, Any]:
    """{"fp8": {parameter: {role: {"amax", "saturated", "underflowed"}}}}, the latter two as shares; empty without
    samples. An amax that is not finite is None."""
    found: dict[str, dict[str, dict[str, float | None]]] = {}
    for (weight, role), each in merged(samples).items():
        found.setdefault(weight, {})[role] = {
            "amax": each.amax if math.isfinite(each.amax) else None,
            "saturated": each.saturated / each.values,
            "underflowed": each.underflowed / each.values,
        }
    return {"fp8": found} if found else {}


def gradients_row(sums: Iterable[GradientSums]) -> dict[str, Any]:
    """{"fp8_gradients": {parameter: cosine}}, empty for steps that were not compared. A cosine that is not finite is
    None."""
    found = {weight: each if math.isfinite(each) else None for weight, each in cosines(sums).items()}
    return {"fp8_gradients": found} if found else {}


class Fp8Health:
    """Detects signs of FP8 trouble early. An operand is reported once, and again only after it has recovered."""

    def __init__(self) -> None:
        self.maxima: dict[tuple[str, str], deque[float]] = defaultdict(lambda: deque(maxlen=REMEMBERED))
        self.ailing: set[tuple[str, str]] = set()

    def warnings(self, row: dict[str, Any]) -> list[str]:
        """Sentences about the operands of a row of metrics.jsonl."""
        found = []
        for weight, roles in row.get("fp8", {}).items():
            for role, sample in roles.items():
                problem = self._problem((weight, role), **sample)
                if problem and (weight, role) not in self.ailing:
                    found.append(f"the {role}s of {weight} {problem}")
                (self.ailing.add if problem else self.ailing.discard)((weight, role))
        return _first(found, "operands have such values; see fp8 in metrics.jsonl") + self._gradients(row)

    def _gradients(self, row: dict[str, Any]) -> list[str]:
        found = []
        for weight, cosine in row.get("fp8_gradients", {}).items():
            is_apart = cosine is not None and cosine < COSINE
            if is_apart and (weight, "cosine") not in self.ailing:
                found.append(f"the gradient of {weight} has a cosine of {cosine:.3f} with that of precision.compute")
            (self.ailing.add if is_apart else self.ailing.discard)((weight, "cosine"))
        return _first(found, f"gradients have cosines below {COSINE}; see fp8_gradients in metrics.jsonl")

    def _problem(self, key: tuple[str, str], amax: float | None, saturated: float, underflowed: float) -> str:
        if amax is None:
            return "are not finite"
        before = self.maxima[key]
        usual = median(before) if len(before) >= LEAST else math.inf
        before.append(amax)
        if amax > GROWTH * usual:
            return f"reach {amax:.3g}, {amax / usual:.0f} times what they usually do"
        if saturated > SATURATED:
            return f"saturate: {saturated:.0%} of them have the largest magnitude of 8 bits"
        if underflowed > UNDERFLOWED:
            return f"are too small for 8 bits: {underflowed:.0%} of them became zero"
        return ""


def _first(found: list[str], rest: str) -> list[str]:
    more = len(found) - MOST
    return [*found[:MOST], f"{more} other {rest}"] if more > 0 else found
