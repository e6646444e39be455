"""The metrics of the exporter: name, help, labels and values, as a collector for prometheus_client.

Names are in base units. Labels have few values (never a step or a microbatch) to keep the number of series small.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable
from itertools import accumulate
from math import inf
from typing import Literal, NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.utils import floatToGoString

Labels = tuple[str, ...]
Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily

RANK: Labels = ("rank", "dp", "pp", "cp", "tp", "ep", "node")
# 100 us to 100 s: three buckets per decade, or ten to resolve changes of a quarter.
COARSE = tuple(float(f"{10 ** (k / 3 - 4):.1g}") for k in range(19))
FINE = tuple(float(f"{10 ** (k / 10 - 4):.2g}") for k in range(61))


class Metric(NamedTuple):
    """`labels` come in addition to `job`, the run's name, which every metric has; `buckets` are those of a
    histogram."""

    kind: Literal["gauge", "counter", "histogram"]
    help: str
    labels: Labels = ()
    buckets: tuple[float, ...] = COARSE


METRICS = {
    "pentad_build_info": Metric(
        "gauge",
        "Always 1; labels tell the version and the program.",
        ("version", "schedule_hash"),
    ),
    "pentad_run_state": Metric("gauge", "1 for the present state of the run, 0 for the others.", ("state",)),
    # progress
    "pentad_step": Metric("gauge", "Optimizer steps done; less after a recovery from a checkpoint."),
    "pentad_step_duration_seconds": Metric("histogram", "Duration of a step.", (), FINE),
    "pentad_tokens_total": Metric("counter", "Tokens trained on, counting replayed steps again."),
    "pentad_model_flops_utilization_ratio": Metric("gauge", "Model FLOPs utilization (MFU) of the last step."),
    "pentad_effective_training_time_ratio": Metric(
        "gauge",
        "Effective training time ratio (ETTR): share of the driver's lifetime in steps, each counted once.",
    ),
    "pentad_loss": Metric("gauge", "Loss per token of the last step, NaN when it was not finite."),
    "pentad_grad_norm": Metric("gauge", "Global gradient norm before clipping, NaN when it was not finite."),
    "pentad_learning_rate": Metric("gauge", "Learning rate of the last step."),
    "pentad_nonfinite_values_total": Metric(
        "counter", "Steps with a non-finite loss or gradient norm; the latter skip their update.", ("tensor",)
    ),
    # the program
    "pentad_bubble_ratio": Metric("gauge", "Idle share of the ranks' time in the last step's makespan, measured."),
    "pentad_bubble_planned_ratio": Metric("gauge", "The same, simulated with measured costs."),
    "pentad_instruction_duration_seconds": Metric("histogram", "Duration of an instruction on its lane.", ("op",)),
    # the ranks
    "pentad_heartbeat_timestamp_seconds": Metric("gauge", "Unix time at which the rank last answered.", RANK),
    "pentad_world_size": Metric("gauge", "Live ranks of the mesh."),
    "pentad_generation": Metric("gauge", "Incarnation of the worker group."),
    "pentad_failures_total": Metric(
        "counter", "Ranks lost, by kind of fault and by how it was detected.", ("fault", "detector")
    ),
    "pentad_recovery_duration_seconds": Metric("histogram", "Duration of each phase of a recovery.", ("phase",)),
    "pentad_steps_discarded_total": Metric("counter", "Steps replayed after recoveries."),
    # checkpoints
    "pentad_checkpoint_duration_seconds": Metric("histogram", "Time to write a checkpoint.", ("stage",)),
    "pentad_checkpoint_last_success_timestamp_seconds": Metric(
        "gauge", "Unix time of the newest checkpoint that this driver committed.", ("tier",)
    ),
    "pentad_checkpoint_bytes_total": Metric("counter", "Bytes of checkpoints written."),
    "pentad_checkpoint_failures_total": Metric("counter", "Checkpoints that could not be written."),
    # GPUs
    "pentad_gpu_memory_peak_bytes": Metric("gauge", "Peak memory of tensors in the last step, on the fullest rank."),
    "pentad_gpu_memory_used_bytes": Metric("gauge", "Used memory of the rank's GPU, by all processes.", RANK),
    "pentad_gpu_memory_size_bytes": Metric("gauge", "Memory of the rank's GPU.", RANK),
    "pentad_gpu_power_watts": Metric("gauge", "Power that the rank's GPU draws.", RANK),
    "pentad_gpu_clock_hertz": Metric("gauge", "SM clock of the rank's GPU.", RANK),
    "pentad_gpu_temperature_celsius": Metric("gauge", "Temperature of the rank's GPU.", RANK),
    "pentad_gpu_throttled": Metric("gauge", "Whether the clocks of the rank's GPU are throttled.", (*RANK, "reason")),
    "pentad_gpu_ecc_errors_total": Metric(
        "counter", "ECC errors of the rank's GPU since its driver was loaded.", (*RANK, "type")
    ),
}


class Histogram:
    """Counts by bucket, with one more for values above the last, and the sum of all values."""

    def __init__(self, buckets: tuple[float, ...]) -> None:
        self.buckets, self.sum = buckets, 0.0
        self.counts = [0] * (len(buckets) + 1)

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.buckets, value)] += 1
        self.sum += value

    def cumulative(self) -> list[tuple[str, float]]:
        bounds = map(floatToGoString, (*self.buckets, inf))
        return list(zip(bounds, accumulate(self.counts), strict=True))


class Exposition:
    """The values of all metrics, by label values in the metric's order. Hold `lock` to change several at once."""

    def __init__(self, job: str) -> None:
        self.job, self.lock = job, threading.RLock()
        self.numbers: dict[str, dict[Labels, float]] = {name: {} for name in METRICS}
        self.histograms: dict[str, dict[Labels, Histogram]] = {name: {} for name in METRICS}
        self.live: dict[str, Callable[[], float]] = {}  # computed at every scrape

    def put(self, name: str, value: float, *labels: str) -> None:
        with self.lock:
            self.numbers[name][labels] = value

    def replace(self, name: str, values: dict[Labels, float]) -> None:
        """Replaces all values of a metric."""
        with self.lock:
            self.numbers[name] = dict(values)

    def add(self, name: str, amount: float, *labels: str) -> None:
        with self.lock:
            values = self.numbers[name]
            values[labels] = values.get(labels, 0.0) + amount

    def histogram(self, name: str, *labels: str) -> Histogram:
        """The counts, initially zero."""
        with self.lock:
            histograms = self.histograms[name]
            return histograms.get(labels) or histograms.setdefault(labels, Histogram(METRICS[name].buckets))

    def collect(self) -> Iterable[Family]:
        with self.lock:
            for name, compute in self.live.items():
                self.put(name, compute())
            return [self._family(name, metric) for name, metric in METRICS.items()]

    def _family(self, name: str, metric: Metric) -> Family:
        labels = (*metric.labels, "job")
        if metric.kind == "histogram":
            buckets = HistogramMetricFamily(name, metric.help, labels=labels)
            for values, histogram in self.histograms[name].items():
                buckets.add_metric((*values, self.job), histogram.cumulative(), histogram.sum)
            return buckets
        kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
        family = kind(name, metric.help, labels=labels)
        for values, number in self.numbers[name].items():
            family.add_metric((*values, self.job), number)
        return family
