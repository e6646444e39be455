"""A run's Prometheus exporter, in the driver: the table of metrics, and a watcher that keeps their values.

Values are in base units, which the names state. Labels have few values (never a step or a microbatch), to keep the
number of series small.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate, product
from math import inf, nan
from typing import Any, Literal, NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from pentad.orchestrator.config.version import release
from pentad.orchestrator.monitoring.metrics_server import MetricsServer
from pentad.orchestrator.monitoring.run_state import RUN_STATES, RankView, RunView, Watcher, makes_progress
from pentad.schedules.diagnosis.rank_times import RankTime
from pentad.schedules.simulate.timeline import Span
from pentad.workers.runtime.telemetry import THROTTLES, GpuState

Labels = tuple[str, ...]

RANK: Labels = ("rank", "dp", "pp", "cp", "tp", "ep", "node")
# 100 us to 100 s: three buckets per decade, or ten to resolve changes of 25 %.
COARSE = tuple(float(f"{10 ** (k / 3 - 4):.1g}") for k in range(19))
FINE = tuple(float(f"{10 ** (k / 10 - 4):.2g}") for k in range(61))
# Exported as zero from the start: Prometheus sees no increase in a counter that first appears as 1.
FAULTS = ("killed", "memory", "hang", "node", "error", "drain", "slow", "corrupt")
DETECTORS = ("ray", "heartbeat", "deadline", "peer", "notice", "times", "check")
CHECKPOINT_STAGES = {"snapshot": "snapshot_seconds", "wait": "waited_seconds", "disk": "seconds"}  # keys of the event
PHASES = ("detect", "fence", "place", "load", "connect", "state")
FP8: Labels = ("parameter", "operand")
MOST_SERIES = 2000  # pentad_rank_seconds series of one rank; beyond that its stages are added up
TENSORS = {"loss": "loss", "grad_norm": "gradient"}


class Metric(NamedTuple):
    """`labels` come in addition to `job`, the run's name, which every metric has; `buckets` are for histograms.

    A gauge may show the last value of a key of metrics.jsonl (`row`), or a field of GpuState for each rank's GPU
    (`gpu`); it has no value where that is None.
    """

    kind: Literal["gauge", "counter", "histogram"]
    help: str
    labels: Labels = ()
    buckets: tuple[float, ...] = COARSE
    row: str = ""
    gpu: str = ""


METRICS = {
    "pentad_build_info": Metric(
        "gauge", "Always 1; labels tell the version and the program.", ("version", "schedule_hash")
    ),
    "pentad_run_state": Metric("gauge", "1 for the present state of the run, 0 for the others.", ("state",)),
    # progress
    "pentad_step": Metric("gauge", "Optimizer steps done; less after a recovery from a checkpoint."),
    "pentad_step_duration_seconds": Metric("histogram", "Duration of a step.", buckets=FINE),
    "pentad_tokens_total": Metric("counter", "Tokens trained on, counting replayed steps again."),
    "pentad_model_flops_utilization_ratio": Metric(
        "gauge", "Model FLOPs utilization (MFU) of the last step.", row="mfu"
    ),
    "pentad_effective_training_time_ratio": Metric(
        "gauge", "Effective training time ratio (ETTR): share of the driver's lifetime in steps, each counted once."
    ),
    "pentad_loss": Metric("gauge", "Loss per token of the last step, NaN when it was not finite."),
    "pentad_grad_norm": Metric("gauge", "Global gradient norm before clipping, NaN when it was not finite."),
    "pentad_learning_rate": Metric("gauge", "Learning rate of the last step.", row="lr"),
    "pentad_fp8_amax": Metric(
        "gauge", "Absolute maximum of an operand in 8 bits in the last step that was sampled, NaN if not finite.", FP8
    ),
    "pentad_fp8_saturated_ratio": Metric(
        "gauge", "Share of its values with the largest magnitude that 8 bits have.", FP8
    ),
    "pentad_fp8_underflowed_ratio": Metric("gauge", "Share of its values that are zero in 8 bits.", FP8),
    "pentad_fp8_gradient_cosine": Metric(
        "gauge", "Cosine of a gradient with that in the compute dtype, of the last step compared.", ("parameter",)
    ),
    "pentad_nonfinite_values_total": Metric(
        "counter", "Steps with a non-finite loss or gradient norm; the latter skip their update.", ("tensor",)
    ),
    # evaluation
    "pentad_eval_loss": Metric(
        "gauge", "Loss per token of the last evaluation, NaN when it was not finite.", ("data",)
    ),
    "pentad_eval_step": Metric("gauge", "Optimizer steps that the last evaluated weights have had."),
    "pentad_eval_next_step": Metric("gauge", "Optimizer steps after which the next evaluation is due, if one is."),
    "pentad_eval_duration_seconds": Metric("histogram", "Duration of an evaluation on all its data sets."),
    # the program
    "pentad_bubble_ratio": Metric(
        "gauge", "Idle share of the ranks' time in the last step's makespan, measured.", row="bubble_measured"
    ),
    "pentad_bubble_planned_ratio": Metric("gauge", "The same, simulated with measured costs.", row="bubble_planned"),
    "pentad_instruction_duration_seconds": Metric("histogram", "Duration of an instruction on its lane.", ("op",)),
    "pentad_rank_seconds": Metric(
        "gauge",
        "Seconds of a rank in an op on a stage in the last step, without waits inside layers; DATA and HOST are what "
        "the loader and the host kept waiting. RECV_F and RECV_B are one link each: from the rank with the stage "
        "before, and with the one after.",
        ("rank", "op", "stage"),
    ),
    # the ranks
    "pentad_heartbeat_timestamp_seconds": Metric("gauge", "Unix time at which the rank last answered.", RANK),
    "pentad_world_size": Metric("gauge", "Live ranks of the mesh."),
    "pentad_spares": Metric("gauge", "Processes that wait to take the place of a lost rank."),
    "pentad_generation": Metric("gauge", "Incarnation of the worker group."),
    "pentad_failures_total": Metric(
        "counter", "Ranks lost, by kind of fault and by how it was detected.", ("fault", "detector")
    ),
    "pentad_recovery_duration_seconds": Metric("histogram", "Duration of each phase of a recovery.", ("phase",)),
    "pentad_steps_discarded_total": Metric("counter", "Steps replayed after recoveries, or rolled back."),
    "pentad_steps_skipped_total": Metric("counter", "Steps that changed no weight: not finite, or spikes."),
    # checkpoints
    "pentad_checkpoint_duration_seconds": Metric(
        "histogram", "Time to copy the state, that training waited, and until a checkpoint was committed.", ("stage",)
    ),
    "pentad_checkpoint_last_success_timestamp_seconds": Metric(
        "gauge", "Unix time of the newest checkpoint that this driver committed.", ("tier",)
    ),
    "pentad_checkpoint_bytes_total": Metric("counter", "Bytes of checkpoints written."),
    "pentad_checkpoint_failures_total": Metric("counter", "Checkpoints that could not be written."),
    # GPUs
    "pentad_gpu_memory_peak_bytes": Metric("gauge", "Peak memory of tensors in the last step, on the fullest rank."),
    "pentad_gpu_memory_used_bytes": Metric(
        "gauge", "Used memory of the rank's GPU, by all processes.", RANK, gpu="memory_used"
    ),
    "pentad_gpu_memory_size_bytes": Metric("gauge", "Memory of the rank's GPU.", RANK, gpu="memory_total"),
    "pentad_gpu_power_watts": Metric("gauge", "Power that the rank's GPU draws.", RANK, gpu="power"),
    "pentad_gpu_clock_hertz": Metric("gauge", "SM clock of the rank's GPU.", RANK, gpu="clock"),
    "pentad_gpu_temperature_celsius": Metric("gauge", "Temperature of the rank's GPU.", RANK, gpu="temperature"),
    "pentad_gpu_throttled": Metric("gauge", "Whether the clocks of the rank's GPU are throttled.", (*RANK, "reason")),
    "pentad_gpu_ecc_errors_total": Metric(
        "counter", "ECC errors of the rank's GPU since its driver was loaded.", (*RANK, "type")
    ),
    "pentad_gpu_xid_errors_total": Metric(
        "counter", "Errors of the rank's GPU that its driver has reported to the rank, by XID.", (*RANK, "xid")
    ),
}
FAMILIES: dict[str, Any] = {
    "gauge": GaugeMetricFamily,
    "counter": CounterMetricFamily,
    "histogram": HistogramMetricFamily,
}


class Histogram:
    """Counts by bucket, plus one count for values above the last bucket, and the sum of all values."""

    def __init__(self, buckets: tuple[float, ...]) -> None:
        self.buckets, self.sum = buckets, 0.0
        self.counts = [0] * (len(buckets) + 1)

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.buckets, value)] += 1
        self.sum += value

    def cumulative(self) -> list[tuple[str, float]]:
        bounds = map(floatToGoString, (*self.buckets, inf))
        return list(zip(bounds, accumulate(self.counts), strict=True))


class Exporter(Watcher, Collector):
    """Serves the metrics of run `job` over HTTP from construction until `close`. Port 0 means any free port.

    Raises PentadError if nothing can listen there.
    """

    def __init__(self, job: str, host: str, port: int) -> None:
        self._job, self._lock = job, threading.RLock()  # held while several values change together
        self._values: dict[str, dict[Labels, Any]] = {name: {} for name in METRICS}  # numbers or Histograms, by labels
        self._ranks: dict[int, Labels] = {}
        self._furthest, self._productive, self._began = -1, 0.0, time.monotonic()
        self._init_values()
        self._is_healthy = True
        self._server = MetricsServer(self, host, port, lambda: self._is_healthy)

    @property
    def address(self) -> str:
        """HOST:PORT."""
        return self._server.address

    def collect(self) -> list[Any]:
        """The metric families, for prometheus_client."""
        with self._lock:
            elapsed = max(1e-9, time.monotonic() - self._began)
            self._put("pentad_effective_training_time_ratio", self._productive / elapsed)
            return [self._family(name, metric) for name, metric in METRICS.items()]

    def on_ranks_placed(self, view: RunView) -> None:
        """Drops ranks that are gone, and all GPU readings until there are new ones."""
        with self._lock:
            self._values["pentad_build_info"] = {(release(), view.program): 1.0}
            self.on_view(view)
            self.on_gpu_states({})

    def on_steps(self, rows: Sequence[dict[str, Any]], spans: Sequence[tuple[Span, ...]]) -> None:
        with self._lock:
            for row in rows:
                self._step(row)
            for each in spans:
                ops = {span.op for span in each}
                histograms = {op: self._histogram("pentad_instruction_duration_seconds", op) for op in ops}
                for span in each:
                    histograms[span.op].observe(span.end - span.start)

    def on_rank_times(self, times: tuple[RankTime, ...]) -> None:
        series = Counter(each.rank for each in times)
        seconds: dict[Labels, float] = {}
        for each in times:
            stage = "" if each.stage < 0 or series[each.rank] > MOST_SERIES else str(each.stage)
            labels = str(each.rank), each.op, stage
            seconds[labels] = seconds.get(labels, 0.0) + each.own
        with self._lock:
            self._values["pentad_rank_seconds"] = seconds

    def on_view(self, view: RunView) -> None:
        """Updates the run's state and size, and the ranks' heartbeats by this host's clock."""
        epoch = time.time() - time.monotonic()
        self._is_healthy = makes_progress(view)
        with self._lock:
            self._values["pentad_run_state"] = {(state,): float(state == view.state) for state in RUN_STATES}
            self._put("pentad_step", view.step)
            self._put("pentad_generation", view.generation)
            self._put("pentad_spares", view.spares)
            self._put("pentad_world_size", sum(rank.state != "lost" for rank in view.ranks))
            self._ranks = {rank.rank: rank_labels(rank) for rank in view.ranks}
            heard = {self._ranks[rank.rank]: round(epoch + rank.heartbeat, 3) for rank in view.ranks}
            self._values["pentad_heartbeat_timestamp_seconds"] = heard
            following = view.next_evaluation
            self._values["pentad_eval_next_step"] = {} if following is None else {(): following}

    def on_event(self, entry: dict[str, Any]) -> None:
        with self._lock:
            match entry["event"]:
                case "lost":
                    self._add("pentad_failures_total", 1, entry["fault"], entry["detector"])
                case "recovered":
                    for phase, seconds in entry["seconds"].items():
                        self._histogram("pentad_recovery_duration_seconds", phase).observe(seconds)
                    self._add("pentad_steps_discarded_total", entry["steps_replayed"])
                case "checkpoint":
                    for stage in (stage for stage, key in CHECKPOINT_STAGES.items() if key in entry):
                        seconds = entry[CHECKPOINT_STAGES[stage]]
                        self._histogram("pentad_checkpoint_duration_seconds", stage).observe(seconds)
                    self._put("pentad_checkpoint_last_success_timestamp_seconds", entry["time"], "disk")
                    self._add("pentad_checkpoint_bytes_total", entry["bytes"])
                case "skip":
                    self._add("pentad_steps_skipped_total", 1)
                case "rollback":
                    self._add("pentad_steps_discarded_total", entry["step"] + 1 - entry["to"])
                case "checkpoint failed":
                    self._add("pentad_checkpoint_failures_total", 1)

    def on_gpu_states(self, states: dict[int, GpuState]) -> None:
        """Replaces all readings of the ranks' GPUs; `states` is by rank."""
        known = [(self._ranks[rank], state) for rank, state in states.items() if rank in self._ranks]
        with self._lock:
            for name, metric in METRICS.items():
                if metric.gpu:
                    read = ((labels, getattr(state, metric.gpu)) for labels, state in known)
                    self._values[name] = {labels: value for labels, value in read if value is not None}
            self._values["pentad_gpu_throttled"] = {
                (*labels, reason): float(reason in state.throttles)
                for labels, state in known
                if state.throttles is not None
                for reason in THROTTLES
            }
            self._values["pentad_gpu_ecc_errors_total"] = {
                (*labels, "uncorrected"): float(state.ecc_errors)
                for labels, state in known
                if state.ecc_errors is not None
            }
            self._values["pentad_gpu_xid_errors_total"] = {
                (*labels, str(xid)): float(count)
                for labels, state in known
                for xid, count in Counter(state.xids or ()).items()
            }

    def on_evaluation(self, rows: Sequence[dict[str, Any]], spans: tuple[Span, ...]) -> None:
        with self._lock:
            for row in rows:
                self._put("pentad_eval_loss", nan if row["loss"] is None else row["loss"], row["data"])
            self._put("pentad_eval_step", rows[0]["step"])
            self._histogram("pentad_eval_duration_seconds").observe(rows[0]["seconds"])

    def close(self) -> None:
        self._server.close()

    def _init_values(self) -> None:
        for counter in ("tokens", "steps_discarded", "steps_skipped", "checkpoint_bytes", "checkpoint_failures"):
            self._put(f"pentad_{counter}_total", 0.0)
        for labels in product(FAULTS, DETECTORS):
            self._put("pentad_failures_total", 0.0, *labels)
        for tensor in TENSORS.values():
            self._put("pentad_nonfinite_values_total", 0.0, tensor)
        self._histogram("pentad_step_duration_seconds")
        for stage in CHECKPOINT_STAGES:
            self._histogram("pentad_checkpoint_duration_seconds", stage)
        for phase in PHASES:
            self._histogram("pentad_recovery_duration_seconds", phase)

    def _step(self, row: dict[str, Any]) -> None:
        self._histogram("pentad_step_duration_seconds").observe(row["step_seconds"])
        self._add("pentad_tokens_total", row["tokens"])
        for key, tensor in TENSORS.items():
            self._put(f"pentad_{key}", nan if row[key] is None else row[key])
            self._add("pentad_nonfinite_values_total", row[key] is None, tensor)
        for name, metric in METRICS.items():
            if metric.row and row[metric.row] is not None:
                self._put(name, row[metric.row])
        for parameter, operands in row.get("fp8", {}).items():
            for operand, sample in operands.items():
                at = parameter, operand
                self._put("pentad_fp8_amax", nan if sample["amax"] is None else sample["amax"], *at)
                self._put("pentad_fp8_saturated_ratio", sample["saturated"], *at)
                self._put("pentad_fp8_underflowed_ratio", sample["underflowed"], *at)
        for parameter, cosine in row.get("fp8_gradients", {}).items():
            self._put("pentad_fp8_gradient_cosine", nan if cosine is None else cosine, parameter)
        if row["peak_bytes"]:  # not measured on a CPU
            self._put("pentad_gpu_memory_peak_bytes", row["peak_bytes"])
        if row["step"] > self._furthest:  # replayed steps are not productive
            self._furthest = row["step"]
            self._productive += row["step_seconds"]

    def _put(self, name: str, value: float, *labels: str) -> None:
        self._values[name][labels] = value

    def _add(self, name: str, amount: float, *labels: str) -> None:
        self._values[name][labels] = self._values[name].get(labels, 0.0) + amount

    def _histogram(self, name: str, *labels: str) -> Histogram:
        """The histogram with these labels, created with zero counts."""
        return self._values[name].setdefault(labels, Histogram(METRICS[name].buckets))

    def _family(self, name: str, metric: Metric) -> Any:
        family = FAMILIES[metric.kind](name, metric.help, labels=(*metric.labels, "job"))
        for labels, value in self._values[name].items():
            samples = (value.cumulative(), value.sum) if isinstance(value, Histogram) else (value,)
            family.add_metric((*labels, self._job), *samples)
        return family


def rank_labels(view: RankView) -> Labels:
    """The values of the labels RANK."""
    at = view.coordinates
    return (*map(str, (view.rank, at.dp, at.pp, at.cp, at.tp, at.ep)), view.node)
