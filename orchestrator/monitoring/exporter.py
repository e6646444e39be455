"""The Prometheus exporter of a run, on its driver: a watcher that turns events into metrics of all ranks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import product
from math import nan
from typing import Any

from pentad.orchestrator.config.version import release
from pentad.orchestrator.monitoring.exposition import Exposition, Labels
from pentad.orchestrator.monitoring.metrics_server import MetricsServer
from pentad.orchestrator.monitoring.run_state import RUN_STATES, RankView, RunView
from pentad.schedules.simulate.timeline import Span
from pentad.workers.runtime.telemetry import THROTTLES, GpuState

# Exported as zero from the start: Prometheus sees no increase in a counter that first appears as 1.
FAULTS = ("killed", "hang", "node", "error", "drain")
DETECTORS = ("ray", "heartbeat", "deadline", "peer", "notice")
PHASES = ("detect", "fence", "place", "connect", "state")
TENSORS = {"loss": "loss", "grad_norm": "gradient"}
GPU = {
    "pentad_gpu_memory_used_bytes": "memory_used",
    "pentad_gpu_memory_size_bytes": "memory_total",
    "pentad_gpu_power_watts": "power",
    "pentad_gpu_clock_hertz": "clock",
    "pentad_gpu_temperature_celsius": "temperature",
}


class Exporter:
    """Serves the metrics of run `job` over HTTP from construction until `close`. Port 0 means a free one.

    Raises PentadError when nothing can listen there.
    """

    def __init__(self, job: str, host: str, port: int) -> None:
        self._values = Exposition(job)
        self._ranks: dict[int, Labels] = {}
        self._furthest, self._productive, self._began = -1, 0.0, time.monotonic()
        self._init_values()
        self._server = MetricsServer(self._values, host, port)

    @property
    def address(self) -> str:
        """HOST:PORT."""
        return self._server.address

    def on_ranks_placed(self, view: RunView) -> None:
        """Drops ranks that are gone, and all GPU readings until there are new ones."""
        labels = (release(), view.program)
        with self._values.lock:
            self._values.replace("pentad_build_info", {labels: 1.0})
            self.on_view(view)
            self.set_gpu_states({})

    def on_steps(self, rows: Sequence[dict[str, Any]], spans: Sequence[tuple[Span, ...]]) -> None:
        with self._values.lock:
            for row in rows:
                self._step(row)
            for each in spans:
                self._spans(each)

    def on_view(self, view: RunView) -> None:
        """The run's state and size, and heartbeats on this host's clock."""
        values, epoch = self._values, time.time() - time.monotonic()
        with values.lock:
            values.replace("pentad_run_state", {(state,): float(state == view.state) for state in RUN_STATES})
            values.put("pentad_step", view.step)
            values.put("pentad_generation", view.generation)
            values.put("pentad_world_size", sum(rank.state != "lost" for rank in view.ranks))
            self._ranks = {rank.rank: rank_labels(rank) for rank in view.ranks}
            heard = {self._ranks[rank.rank]: round(epoch + rank.heartbeat, 3) for rank in view.ranks}
            values.replace("pentad_heartbeat_timestamp_seconds", heard)

    def on_event(self, entry: dict[str, Any]) -> None:
        with self._values.lock:
            match entry["event"]:
                case "lost":
                    self._values.add("pentad_failures_total", 1, entry["fault"], entry["detector"])
                case "recovered":
                    self._recovered(entry)
                case "checkpoint":
                    self._checkpoint(entry)
                case "checkpoint failed":
                    self._values.add("pentad_checkpoint_failures_total", 1)

    def set_gpu_states(self, states: dict[int, GpuState]) -> None:
        """Replaces the readings of the ranks' GPUs, by rank; those of other ranks are dropped."""
        known = {self._ranks[rank]: state for rank, state in states.items() if rank in self._ranks}
        with self._values.lock:
            for name, field in GPU.items():
                values = {labels: getattr(state, field) for labels, state in known.items()}
                self._values.replace(name, {labels: value for labels, value in values.items() if value is not None})
            throttled = {
                (*labels, reason): float(reason in state.throttles)
                for labels, state in known.items()
                if state.throttles is not None
                for reason in THROTTLES
            }
            self._values.replace("pentad_gpu_throttled", throttled)
            errors = {(*at, "uncorrected"): float(s.ecc_errors) for at, s in known.items() if s.ecc_errors is not None}
            self._values.replace("pentad_gpu_ecc_errors_total", errors)

    def close(self) -> None:
        self._server.close()

    def _init_values(self) -> None:
        values = self._values
        for counter in ("tokens", "steps_discarded", "checkpoint_bytes", "checkpoint_failures"):
            values.add(f"pentad_{counter}_total", 0)
        for labels in product(FAULTS, DETECTORS):
            values.add("pentad_failures_total", 0, *labels)
        for tensor in TENSORS.values():
            values.add("pentad_nonfinite_values_total", 0, tensor)
        values.histogram("pentad_step_duration_seconds")
        values.histogram("pentad_checkpoint_duration_seconds", "disk")
        for phase in PHASES:
            values.histogram("pentad_recovery_duration_seconds", phase)
        values.live["pentad_effective_training_time_ratio"] = self._effective

    def _effective(self) -> float:
        return self._productive / max(1e-9, time.monotonic() - self._began)

    def _step(self, row: dict[str, Any]) -> None:
        values = self._values
        values.histogram("pentad_step_duration_seconds").observe(row["step_seconds"])
        values.add("pentad_tokens_total", row["tokens"])
        values.put("pentad_learning_rate", row["lr"])
        for key, tensor in TENSORS.items():
            values.put(f"pentad_{key}", nan if row[key] is None else row[key])
            values.add("pentad_nonfinite_values_total", row[key] is None, tensor)
        for name, key in {
            "pentad_model_flops_utilization_ratio": "mfu",
            "pentad_bubble_ratio": "bubble_measured",
            "pentad_bubble_planned_ratio": "bubble_planned",
        }.items():
            if row[key] is not None:
                values.put(name, row[key])
        if row["peak_bytes"]:  # not measured on a CPU
            values.put("pentad_gpu_memory_peak_bytes", row["peak_bytes"])
        if row["step"] > self._furthest:  # replayed steps are not productive
            self._furthest = row["step"]
            self._productive += row["step_seconds"]

    def _spans(self, spans: Sequence[Span]) -> None:
        histograms = {
            op: self._values.histogram("pentad_instruction_duration_seconds", op) for op in {s.op for s in spans}
        }
        for span in spans:
            histograms[span.op].observe(span.end - span.start)

    def _recovered(self, entry: dict[str, Any]) -> None:
        for phase, seconds in entry["seconds"].items():
            self._values.histogram("pentad_recovery_duration_seconds", phase).observe(seconds)
        self._values.add("pentad_steps_discarded_total", entry["steps_replayed"])

    def _checkpoint(self, entry: dict[str, Any]) -> None:
        self._values.histogram("pentad_checkpoint_duration_seconds", "disk").observe(entry["seconds"])
        self._values.put("pentad_checkpoint_last_success_timestamp_seconds", entry["time"], "disk")
        self._values.add("pentad_checkpoint_bytes_total", entry["bytes"])


def rank_labels(view: RankView) -> Labels:
    """Label values of exposition.RANK."""
    at = view.coordinates
    return (*map(str, (view.rank, at.dp, at.pp, at.cp, at.tp, at.ep)), view.node)
