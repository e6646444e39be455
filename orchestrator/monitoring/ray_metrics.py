"""A few figures of a run among Ray's own metrics, for those who only have Ray's scrape: ray_pentad_loss and so on."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import ray
from ray.util.metrics import Gauge

from pentad.orchestrator.monitoring.run_state import RunView
from pentad.schedules.simulate.timeline import Span

GAUGES = {
    "pentad_step": "Optimizer steps done.",
    "pentad_loss": "Loss of a token in the last step.",
    "pentad_tokens_per_second": "Tokens a second in the last step.",
    "pentad_world_size": "Ranks of the mesh that are not lost.",
    "pentad_bubble_ratio": "Idle share of the ranks' time in the last step, as measured.",
}


class RayMetrics:
    """A watcher that does nothing while no Ray is joined. Ray reports the figures of run `job` every ten seconds."""

    def __init__(self, job: str) -> None:
        self._job, self._gauges = job, dict[str, Any]()

    def plan(self, view: RunView) -> None:
        self.view(view)

    def steps(self, rows: Sequence[dict[str, Any]], spans: Sequence[tuple[Span, ...]]) -> None:
        last = rows[-1]
        self._set("pentad_loss", last["loss"])
        self._set("pentad_tokens_per_second", last["tokens_per_second"])
        self._set("pentad_bubble_ratio", last["bubble_measured"])

    def view(self, view: RunView) -> None:
        self._set("pentad_step", view.step)
        self._set("pentad_world_size", sum(rank.state != "lost" for rank in view.ranks))

    def event(self, entry: dict[str, Any]) -> None:
        pass

    def close(self) -> None:
        self._gauges.clear()

    def _set(self, name: str, value: float | None) -> None:
        """A figure that Ray does not take is no reason to end a run."""
        if value is None or not ray.is_initialized():
            return
        with suppress(Exception):
            if name not in self._gauges:
                self._gauges[name] = Gauge(name, GAUGES[name], tag_keys=("job",))
            self._gauges[name].set(value, tags={"job": self._job})
