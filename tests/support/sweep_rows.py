"""Rows of a sweep's page: five measured, one pruned, one failed."""

from __future__ import annotations

from typing import Any

from pentad.schedules.draw.sweep import SETTINGS, SHOWN, sweep_page


def row(number: int, **more: Any) -> dict[str, Any]:
    known = dict.fromkeys((*SETTINGS, *SHOWN)) | {
        "outcome": "measured",
        "cause": "",
        "command": f"pentad train {number}",
    }
    model = {"model": "llama 1 B", "parameters": 10**9, "device": "cuda", "layout": f"layout {number}"}
    sizes = {"ranks": 2, "pp": 1 + number % 2, "schedule": "1f1b", "settings": f"mesh.pp={1 + number % 2}"}
    times = {
        "tokens_per_second": 1000.0 + number,
        "mfu": 0.4 + number / 100,
        "step_seconds": 0.5,
        "predicted_seconds": 0.4,
    }
    return known | model | sizes | times | more


NOTHING = dict.fromkeys(("tokens_per_second", "mfu", "step_seconds"))
PRUNED = row(8, outcome="pruned", cause="does not fit: </script>", **NOTHING)
HUNG = row(9, outcome="hang", cause="rank 1 does not answer", **NOTHING | {"ranks": 4})
ROWS = [*map(row, range(5)), PRUNED, HUNG]


def page_of(*rows: dict[str, Any]) -> str:
    return sweep_page(rows, title="Sweep of <b>", facts={"trials": str(len(rows))})
