"""What the exporter can tell: every metric with its help, and their values as prometheus_client wants them.

Names are in base units; labels are of few values (never a step or a microbatch), so that Prometheus can keep them.
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
# 100 us to 100 s: three buckets a decade, and ten where a change of a quarter should show.
COARSE = tuple(float(f"{10 ** (k / 3 - 4):.1g}") for k in range(19))
FINE = tuple(float(f"{10 ** (k / 10 - 4):.2g}") for k in range(61))


class Metric(NamedTuple):
    """`labels` are those beside `job`, the run's name, which every metric has; `buckets` are of a histogram."""

    kind: Literal["gauge", "counter", "histogram"]
    help: str
    labels: Labels = ()
    buckets: tuple[float, ...] = COARSE


METRICS = {
    "pentad_build_info": Metric("gauge", "1; which pentad runs which program.", ("version", "schedule_hash")),
    "pentad_run_state": Metric("gauge", "1 for the state the run is in, 0 for the others.", ("state",)),
    # progress
    "pentad_step": Metric("gauge", "Optimizer steps done; less after a recovery from a checkpoint."),
    "pentad_step_duration_seconds": Metric("histogram", "Time of a step, end to end.", (), FINE),
    "pentad_tokens_total": Metric("counter", "Tokens trained on; those of steps done again count again."),
    "pentad_model_flops_utilization_ratio": Metric("gauge", "Model FLOPs of the last step, of what the GPUs can do."),
    "pentad_effective_training_time_ratio": Metric(
        "gauge", "Share of the time since the driver began that went into steps, each counted once (ETTR)."
    ),
    "pentad_loss": Metric("gauge", "Loss of a token in the last step, NaN when it was not finite."),
    "pentad_grad_norm": Metric("gauge", "Global gradient norm before clipping, NaN when it was not finite."),
    "pentad_learning_rate": Metric("gauge", "Learning rate of the last step."),
    "pentad_nonfinite_values_total": Metric(
        "counter", "Steps whose loss or gradient norm was not finite; the latter changed no weight.", ("tensor",)
    ),
    # the program
    "pentad_bubble_ratio": Metric("gauge", "Idle share of the ranks' time in the last step, as measured (makespan)."),
    "pentad_bubble_planned_ratio": Metric("gauge", "The same, as simulated with measured costs."),
    "pentad_instruction_duration_seconds": Metric("histogram", "Time of an instruction on its lane.", ("op",)),
    # the ranks
    "pentad_heartbeat_timestamp_seconds": Metric("gauge", "Unix time at which the rank last answered.", RANK),
    "pentad_world_size": Metric("gauge", "Ranks of the mesh that are not lost."),
    "pentad_generation": Metric("gauge", "Incarnation of the group of ranks."),
    "pentad_failures_total": Metric(
        "counter", "Ranks lost, by what befell them and who saw it.", ("fault", "detector")
    ),
    "pentad_recovery_duration_seconds": Metric("histogram", "Time of each phase of a recovery.", ("phase",)),
    "pentad_steps_discarded_total": Metric("counter", "Steps that had to be done again after a recovery."),
    # checkpoints
    "pentad_checkpoint_duration_seconds": Metric("histogram", "Time to write a checkpoint.", ("stage",)),
    "pentad_checkpoint_last_success_timestamp_seconds": Metric(
        "gauge", "Unix time of the newest whole checkpoint of this driver.", ("tier",)
    ),
    "pentad_checkpoint_bytes_total": Metric("counter", "Bytes of checkpoints written."),
    "pentad_checkpoint_failures_total": Metric("counter", "Checkpoints that could not be written."),
    # GPUs
    "pentad_gpu_memory_peak_bytes": Metric("gauge", "Most memory that tensors of one rank took in the last step."),
    "pentad_gpu_memory_used_bytes": Metric("gauge", "Memory of the rank's GPU in use, by all processes.", RANK),
    "pentad_gpu_memory_size_bytes": Metric("gauge", "Memory of the rank's GPU.", RANK),
    "pentad_gpu_power_watts": Metric("gauge", "Power that the rank's GPU draws.", RANK),
    "pentad_gpu_clock_hertz": Metric("gauge", "Clock of the multiprocessors of the rank's GPU.", RANK),
    "pentad_gpu_temperature_celsius": Metric("gauge", "Temperature of the rank's GPU.", RANK),
    "pentad_gpu_throttled": Metric("gauge", "Whether the rank's GPU holds its clocks down.", (*RANK, "reason")),
    "pentad_gpu_ecc_errors_total": Metric(
        "counter", "Memory errors of the rank's GPU since its driver was loaded.", (*RANK, "type")
    ),
}


class Tally:
    """A histogram's counts, a bucket each and one for what is beyond, and the sum of what was counted."""

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
    """The values of all metrics: a collector for prometheus_client. Hold `lock` to change several at once.

    A value is of a metric and of its labels' values, in the metric's order.
    """

    def __init__(self, job: str) -> None:
        self.job, self.lock = job, threading.RLock()
        self.numbers: dict[str, dict[Labels, float]] = {name: {} for name in METRICS}
        self.tallies: dict[str, dict[Labels, Tally]] = {name: {} for name in METRICS}
        self.live: dict[str, Callable[[], float]] = {}  # asked at every scrape

    def put(self, name: str, value: float, *labels: str) -> None:
        with self.lock:
            self.numbers[name][labels] = value

    def replace(self, name: str, values: dict[Labels, float]) -> None:
        """These are the metric's only values from now on."""
        with self.lock:
            self.numbers[name] = dict(values)

    def add(self, name: str, amount: float, *labels: str) -> None:
        with self.lock:
            values = self.numbers[name]
            values[labels] = values.get(labels, 0.0) + amount

    def tally(self, name: str, *labels: str) -> Tally:
        """The histogram's counts, from zero on."""
        with self.lock:
            tallies = self.tallies[name]
            return tallies.get(labels) or tallies.setdefault(labels, Tally(METRICS[name].buckets))

    def collect(self) -> Iterable[Family]:
        with self.lock:
            for name, ask in self.live.items():
                self.put(name, ask())
            return [self._family(name, metric) for name, metric in METRICS.items()]

    def _family(self, name: str, metric: Metric) -> Family:
        labels = (*metric.labels, "job")
        if metric.kind == "histogram":
            histogram = HistogramMetricFamily(name, metric.help, labels=labels)
            for values, tally in self.tallies[name].items():
                histogram.add_metric((*values, self.job), tally.cumulative(), tally.sum)
            return histogram
        kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
        family = kind(name, metric.help, labels=labels)
        for values, number in self.numbers[name].items():
            family.add_metric((*values, self.job), number)
        return family
