"""The adapter's benchmark measures what it says."""

from __future__ import annotations

import custom_model
import pytest

pytestmark = pytest.mark.timeout(120)


def test_every_part_of_a_step_takes_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(custom_model, "TURNS", 1)
    found = custom_model.measured()["milliseconds"]
    assert found.keys() == {"builtin", "modules", "torch alone"}
    assert all(each > 0.1 for times in found.values() for each in times.values())
