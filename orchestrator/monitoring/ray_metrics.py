"""Exports a few metrics of a run through Ray (ray_pentad_loss, ...), for setups that scrape only Ray."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import ray
from ray.util.metrics import Gauge

from pentad.orchestrator.monitoring.run_state import RunView, Watcher
from pentad.schedules.simulate.timeline import Span

GAUGES = {
    "pentad_step": "Optimizer steps done.",
    "pentad_loss": "Loss per token of the last step.",
    "pentad_tokens_per_second": "Tokens per second in the last step.",
    "pentad_world_size": "Live ranks of the mesh.",
    "pentad_bubble_ratio": "Idle share of the ranks' time in the last step, measured.",
}


class RayMetrics(Watcher):
    """Sets the metrics of run `job`, which Ray reports every ten seconds. Does nothing unless Ray is initialized."""

    def __init__(self, job: str) -> None:
        self._job, self._gauges = job, dict[str, Any]()

    def on_steps(self, rows: Sequence[dict[str, Any]], spans: Sequence[tuple[Span, ...]]) -> None:
        last = rows[-1]
        self._set("pentad_loss", last["loss"])
        self._set("pentad_tokens_per_second", last["tokens_per_second"])
        self._set("pentad_bubble_ratio", last["bubble_measured"])

    def on_view(self, view: RunView) -> None:
        self._set("pentad_step", view.step)
        self._set("pentad_world_size", sum(rank.state != "lost" for rank in view.ranks))

    def close(self) -> None:
        self._gauges.clear()

    def _set(self, name: str, value: float | None) -> None:
        """Ignores errors: no run should end because of a metric."""
        if value is None or not ray.is_initialized():
            return
        with suppress(Exception):
            if name not in self._gauges:
                self._gauges[name] = Gauge(name, GAUGES[name], tag_keys=("job",))
            self._gauges[name].set(value, tags={"job": self._job})
