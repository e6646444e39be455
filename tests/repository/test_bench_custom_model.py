"""The benchmark of the adapter for torch modules times all of a step."""

from __future__ import annotations

import custom_model
import pytest

pytestmark = pytest.mark.timeout(120)


@pytest.mark.slow
def test_every_op_takes_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(custom_model, "ROUNDS", 1)
    found = custom_model.measure()["milliseconds"]
    assert found.keys() == {"builtin", "modules", "torch alone"}
    assert all(milliseconds > 0.1 for times in found.values() for milliseconds in times.values())
