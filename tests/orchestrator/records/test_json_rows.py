"""The fields of a run's rows: what pentad writes is read back, anything else is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from pentad.orchestrator.records.json_rows import checked_row
from pentad.schedules.ir.errors import PentadError

GPUS = {"count": 8, "clock_hertz": 1.5e9, "clock_most_hertz": 1.98e9, "power_watts": 690.5, "throttled": {"power": 8}}
GOOD: list[dict[str, Any]] = [
    {"step": 0, "generation": 1, "loss": 2.5, "mfu": None},
    {"event": "lost", "step": -1},  # a rank before its first step
    {"perplexity": 4.1e111},
    {"gpus": GPUS},
    {"skipped_batches": [[0, 3], [7, 8]], "sources": {"web": {"loss": None, "target_tokens": 5}}},
]
BAD = [
    {"step": 0.5},
    {"step": -2},
    {"step": True},
    {"generation": -1},
    {"generation": 0.5},
    {"generation": 10**400},
    {"tokens": 10**400},
    {"loss": float("nan")},
    {"loss": "low"},
    {"time": -1.0},
    {"event": 3},
    {"skipped_batches": [[0, -3]]},
    {"sources": {"web": {"target_tokens": 5}}},
    {"fp8": {"layers.0.qkv": {"weight": {"amax": 1.0}}}},
    {"fp8": {"layers.0.qkv": 3}},
    {"fp8": []},
    {"gpus": 3},
    {"gpus": GPUS | {"clock_hertz": 0}},
    {"gpus": GPUS | {"throttled": {"power": "all"}}},
    {"gpus": {"count": 8}},
]


@pytest.mark.timeout(10)
@pytest.mark.parametrize("row", GOOD)
def test_rows_of_pentad_are_read(row: dict[str, Any]) -> None:
    assert checked_row(row, "line 1") == row


@pytest.mark.timeout(10)
@pytest.mark.parametrize("row", BAD)
def test_other_values_are_refused_by_name(row: dict[str, Any]) -> None:
    (name,) = row
    with pytest.raises(PentadError, match=f"^line 1 has {name} = .*: expected "):
        checked_row(row, "line 1")
