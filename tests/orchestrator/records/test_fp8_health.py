"""The row of a sampled step, and the warnings before a run diverges."""

from __future__ import annotations

import math
from typing import Any

import pytest

from pentad.orchestrator.loggers.logger import scalars
from pentad.orchestrator.records.fp8_health import Fp8Health, fp8_row, gradients_row
from pentad.orchestrator.records.json_rows import checked_row
from pentad.schedules.ir.errors import PentadError
from pentad.workers.linear.fp8_sample import Fp8Sample, GradientSums


def row_of(amax: float = 1.0, underflowed: int = 0, weights: int = 1, saturated: int = 5) -> dict[str, Any]:
    return fp8_row(Fp8Sample(f"layers.{n}.qkv", "gradient", amax, saturated, underflowed, 100) for n in range(weights))


def test_the_row_has_shares_that_loggers_and_readers_understand() -> None:
    row = row_of(2.0, 25)
    assert row == {"fp8": {"layers.0.qkv": {"gradient": {"amax": 2.0, "saturated": 0.05, "underflowed": 0.25}}}}
    assert checked_row(row, "line 1") == row and fp8_row([]) == {}
    assert checked_row(row_of(math.nan), "line 1")["fp8"]["layers.0.qkv"]["gradient"]["amax"] is None
    assert scalars(row)["train/fp8/layers.0.qkv/gradient/underflowed"] == 0.25


def test_a_steady_run_has_no_warnings() -> None:
    health = Fp8Health()
    assert not any(health.warnings(row_of(1.0 + step % 7, 20)) for step in range(100))


BAD = {
    "40% of them became zero": row_of(underflowed=40),
    "6% of them have the largest": row_of(saturated=6),
    "200 times": row_of(200.0),
    "finite": row_of(math.inf),
}


def test_values_that_vanish_or_explode_or_are_not_finite_are_reported_once_until_they_recover() -> None:
    for words, bad in BAD.items():
        health = Fp8Health()
        for _ in range(5):
            assert not health.warnings(row_of())
        (warning,) = health.warnings(bad)
        assert "gradients of layers.0.qkv" in warning and words in warning
        assert not health.warnings(bad) and not health.warnings(row_of()) and health.warnings(bad)


def test_a_bad_step_has_few_sentences() -> None:
    found = Fp8Health().warnings(row_of(math.nan, weights=100))
    assert len(found) == 4 and "97 other operands" in found[-1]


def compared(*rows: tuple[str, float, float, float]) -> dict[str, Any]:
    return gradients_row(GradientSums(*row) for row in rows)


def test_cosines_are_of_the_sums_of_all_ranks() -> None:
    row = compared(("b", 3.0, 4.0, 4.0), ("a", 1.0, 1.0, 1.0), ("b", 0.0, 5.0, 5.0), ("none", 0.0, 0.0, 1.0))
    assert row == {"fp8_gradients": {"a": 1.0, "b": pytest.approx(3 / 9), "none": None}} and compared() == {}
    assert checked_row(row, "line 1") == row
    with pytest.raises(PentadError, match=r"fp8_gradients = .* expected a cosine or null by parameter"):
        checked_row({"fp8_gradients": {"a": "1"}}, "line 1")
    assert scalars(row)["train/fp8_gradients/b"] == pytest.approx(1 / 3)


def test_gradients_that_point_elsewhere_are_reported_once_until_they_recover() -> None:
    health, good, bad = Fp8Health(), compared(("w", 0.95, 1.0, 1.0)), compared(("w", 0.5, 1.0, 1.0))
    assert not health.warnings(good)
    assert health.warnings(bad) == ["the gradient of w has a cosine of 0.500 with that of precision.compute"]
    assert not health.warnings(bad) and not health.warnings(good) and health.warnings(bad)
    assert len(Fp8Health().warnings(compared(*((f"w{n}", 0.5, 1.0, 1.0) for n in range(9))))) == 4
