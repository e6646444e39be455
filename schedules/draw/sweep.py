"""A self-contained HTML page of a sweep: each model's best trial by number of GPUs, all trials as lines across their
settings, and a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pentad.schedules.draw.page import html_page

# The settings in which trials may differ: key and the name that the page shows.
SETTINGS = {
    **{"model": "model", "ranks": "GPUs", "dp": "dp", "pp": "pp", "cp": "cp", "tp": "tp", "ep": "ep"},
    **{"schedule": "schedule", "microbatches": "microbatches", "sequences": "sequences", "zero": "ZeRO"},
    "recompute": "recompute",
}
SHOWN = (
    *("settings", "command", "outcome", "cause", "device", "layout", "parameters"),
    *("predicted_seconds", "predicted_bytes"),
    *("step_seconds", "tokens_per_second", "mfu", "bubble", "peak_bytes", "wall_seconds"),
)


def sweep_page(rows: Sequence[Mapping[str, Any]], *, title: str, facts: Mapping[str, str]) -> str:
    """The page for trials with the keys SETTINGS and SHOWN; `outcome` is 'measured', 'pruned' or why a trial failed."""
    on_gpus = any(row["device"] == "cuda" for row in rows)
    names = SETTINGS | ({} if on_gpus else {"ranks": "ranks"})
    data = {"settings": names, "trials": [{key: row[key] for key in (*SETTINGS, *SHOWN)} for row in rows]}
    styles, scripts = ("page.css", "sweep/sweep.css"), ("sweep/sweep.js",)
    return html_page("sweep/sweep.html", data, title=title, facts=facts, styles=styles, scripts=scripts)
