"""Prometheus scrapes what the exporter received, under the agreed names and labels."""

import math
import os
import re
import socket
import threading
import time
import urllib.request
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, ClassVar

import pytest
import ray.util.metrics
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample
from promtool import promtool

from pentad.orchestrator.monitoring import ray_metrics
from pentad.orchestrator.monitoring.exporter import COARSE, FINE, FP8, METRICS, RANK, Exporter
from pentad.orchestrator.monitoring.ray_metrics import GAUGES, RayMetrics
from pentad.orchestrator.monitoring.run_state import RankView, RunView
from pentad.schedules.diagnosis.rank_times import RankTime
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.ir.instruction import Op
from pentad.schedules.simulate.timeline import Span
from pentad.schedules.spec.mesh import Mesh
from pentad.workers.runtime.telemetry import GpuState

ROW = {
    **{"step": 0, "loss": 2.5, "grad_norm": 0.75, "lr": 1e-3, "tokens": 2048, "step_seconds": 0.3},
    **{"tokens_per_second": 6826.0, "mfu": 0.4, "bubble_planned": 0.125, "bubble_measured": 0.25, "generation": 1},
    **{"skipped": False, "peak_bytes": 5 << 30, "host_seconds": 0.01, "fp8_gradients": {"mlp": 0.875}},
    "fp8": {"layers.0.mlp.down": {"weight": {"amax": None, "saturated": 0.01, "underflowed": 0.5}}},
}
GPU = GpuState(10 << 30, 80 << 30, 512.5, 1.98e9, 61.0, 2, ("power",), (31, 79, 31))
RECOVERED = {
    **{"event": "recovered", "time": 1.7e9, "generation": 2, "step": 3, "mesh": "pp3", "how": "shrink"},
    **{"seconds": {"fence": 0.2, "place": 1.5, "connect": 0.4, "state": 0.1}, "steps_replayed": 2},
}
CHECKPOINT = {"event": "checkpoint", "time": 1.7e9, "generation": 1, "step": 4, "seconds": 2.0, "bytes": 1000}
CHECKPOINT |= {"snapshot_seconds": 0.25, "waited_seconds": 0.5}


def row(step: int, **changes: Any) -> dict[str, Any]:
    return {**ROW, "step": step, **changes}


def view_of(mesh: Mesh, **changes: Any) -> RunView:
    now = time.monotonic()
    ranks = tuple(
        RankView(rank, mesh.coordinates(rank), f"10.0.0.{rank // 8}", 100 + rank, rank % 8, "running", 3, "", now - 5)
        for rank in range(mesh.size)
    )
    view = RunView("quick", "/runs/quick", "running", 3, 9, 1, str(mesh), "zb-h2", "abc", ranks=ranks)
    return view._replace(**changes)


def spans_of(ranks: int, each: int) -> tuple[Span, ...]:
    ops = ("F", "B", "W", "SEND_F")
    return tuple(
        Span(0, rank, "compute", "", ops[k % 4], 0, k, -1, float(k), k + 0.003)
        for rank in range(ranks)
        for k in range(each)
    )


def scrape(exporter: Exporter) -> dict[str, list[Sample]]:
    text = urllib.request.urlopen(f"http://{exporter.address}/metrics", timeout=10).read().decode()
    found: dict[str, list[Sample]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append(sample)
    return found


def value(samples: dict[str, list[Sample]], name: str, **labels: str) -> float:
    (found,) = (s for s in samples[name] if labels.items() <= s.labels.items())
    return found.value


@pytest.fixture
def exporter() -> Iterator[Exporter]:
    made = Exporter("quick", "127.0.0.1", 0)
    yield made
    made.close()


@pytest.fixture
def full(exporter: Exporter) -> Exporter:
    """An exporter that has received every kind of update."""
    exporter.on_ranks_placed(view_of(Mesh(pp=4), next_evaluation=8))
    exporter.on_steps([ROW], [spans_of(4, 100)])
    exporter.on_rank_times((RankTime(4, 0, "F", 1, 0.5, 0.1),))
    row = {"step": 4, "seconds": 0.5}
    exporter.on_evaluation([row | {"data": "holdout", "loss": 3.5}, row | {"data": "code", "loss": None}], ())
    exporter.on_gpu_states(dict.fromkeys(range(4), GPU))
    for entry in (CHECKPOINT, RECOVERED, {"event": "lost", "rank": 1, "fault": "hang", "detector": "deadline"}):
        exporter.on_event(entry)
    return exporter


def test_every_metric_is_exported_with_the_job_label(full: Exporter) -> None:
    samples = scrape(full)
    assert {re.sub(r"_(bucket|count|sum)$", "", name) for name in samples} == set(METRICS)
    assert {s.labels["job"] for its in samples.values() for s in its} == {"quick"}


def test_promtool_accepts_names_units_and_help(full: Exporter) -> None:
    promtool("check", "metrics", given=urllib.request.urlopen(f"http://{full.address}/metrics", timeout=10).read())


def test_labels_have_few_values(full: Exporter) -> None:
    own = {"version", "schedule_hash", "state", "tensor", "data", "op", "fault", "detector", "phase", "stage", "tier"}
    own |= {*RANK, *FP8, "reason", "type", "xid"}
    assert {label for metric in METRICS.values() for label in metric.labels} <= own
    assert len(Op) * (len(COARSE) + 3) < 500 and len(FINE) < 100


def test_a_step_exports_the_values_of_its_row(full: Exporter) -> None:
    samples = scrape(full)
    assert value(samples, "pentad_learning_rate") + value(samples, "pentad_model_flops_utilization_ratio") == 0.401
    names = ("loss", "grad_norm", "fp8_gradient_cosine", "bubble_ratio", "bubble_planned_ratio", "tokens_total")
    assert [value(samples, f"pentad_{name}") for name in names] == [2.5, 0.75, 0.875, 0.25, 0.125, 2048]
    assert value(samples, "pentad_step_duration_seconds_sum") == 0.3
    assert value(samples, "pentad_gpu_memory_peak_bytes") == 5 << 30
    assert (value(samples, "pentad_fp8_saturated_ratio"), value(samples, "pentad_fp8_underflowed_ratio")) == (0.01, 0.5)


def test_an_evaluation_exports_a_loss_for_each_data_set(full: Exporter) -> None:
    losses = {sample.labels["data"]: sample.value for sample in scrape(full)["pentad_eval_loss"]}
    assert losses["holdout"] == 3.5 and math.isnan(losses["code"])
    names = ("step", "next_step", "duration_seconds_sum")
    assert [value(scrape(full), f"pentad_eval_{name}") for name in names] == [4, 8, 0.5]
    full.on_view(view_of(Mesh(pp=4)))
    assert "pentad_eval_next_step" not in scrape(full)


def test_unmeasured_values_are_not_exported(exporter: Exporter) -> None:
    exporter.on_steps([row(0, mfu=None, bubble_measured=None, peak_bytes=0)], [()])
    missing = {"pentad_model_flops_utilization_ratio", "pentad_bubble_ratio", "pentad_gpu_memory_peak_bytes"}
    assert not missing & set(scrape(exporter))


def test_non_finite_values_are_nan_and_counted(exporter: Exporter) -> None:
    exporter.on_steps([row(0), row(1, grad_norm=None, skipped=True)], [(), ()])
    samples = scrape(exporter)
    assert value(samples, "pentad_grad_norm") != value(samples, "pentad_grad_norm")
    assert value(samples, "pentad_nonfinite_values_total", tensor="gradient") == 1
    assert value(samples, "pentad_nonfinite_values_total", tensor="loss") == 0


def test_spans_become_a_histogram_of_each_op(full: Exporter) -> None:
    samples = scrape(full)
    name = "pentad_instruction_duration_seconds"
    assert {s.labels["op"]: s.value for s in samples[f"{name}_count"]} == dict.fromkeys(("F", "B", "W", "SEND_F"), 100)
    assert value(samples, f"{name}_sum", op="F") == pytest.approx(0.3)
    counts = {float(s.labels["le"]): s.value for s in samples[f"{name}_bucket"] if s.labels["op"] == "F"}
    assert (counts[0.002], counts[0.005], counts[float("inf")]) == (0, 100, 100)


def test_bucket_bounds_are_inclusive(exporter: Exporter) -> None:
    exporter.on_steps([row(0, step_seconds=0.1), row(1, step_seconds=1000.0)], [(), ()])
    counts = {s.labels["le"]: s.value for s in scrape(exporter)["pentad_step_duration_seconds_bucket"]}
    assert (counts["0.079"], counts["0.1"], counts["100.0"], counts["+Inf"]) == (0, 1, 1, 2)


def test_buckets_are_spaced_evenly_from_100_us_to_100_s() -> None:
    for buckets in (COARSE, FINE):
        assert (buckets[0], buckets[-1]) == (1e-4, 100.0)
        ratios = [b / a for a, b in pairwise(buckets)]
        assert max(ratios) / min(ratios) < 1.3


def test_ranks_have_all_coordinates_and_wall_clock_heartbeats(full: Exporter) -> None:
    beats = scrape(full)["pentad_heartbeat_timestamp_seconds"]
    assert [s.labels["rank"] for s in beats] == ["0", "1", "2", "3"]
    want = {"rank": "2", "pp": "2", "dp": "0", "cp": "0", "tp": "0", "ep": "0", "node": "10.0.0.0", "job": "quick"}
    assert beats[2].labels == want
    assert all(abs(time.time() - 5 - s.value) < 2 for s in beats)


def test_series_of_removed_ranks_and_of_their_gpus_disappear(full: Exporter) -> None:
    full.on_ranks_placed(view_of(Mesh(pp=3), generation=2))
    samples = scrape(full)
    ranks = {s.labels["rank"] for its in samples.values() for s in its if "rank" in s.labels}
    assert ranks == {"0", "1", "2"}
    assert not [name for name in samples if name.startswith("pentad_gpu_") and "peak" not in name]
    assert value(samples, "pentad_world_size") == 3
    assert value(samples, "pentad_generation") == 2
    full.on_gpu_states({0: GPU, 3: GPU})
    assert [s.labels["rank"] for s in scrape(full)["pentad_gpu_power_watts"]] == ["0"]


def test_a_lost_rank_keeps_its_last_heartbeat_but_is_not_counted(exporter: Exporter) -> None:
    view = view_of(Mesh(pp=2))
    exporter.on_ranks_placed(view)
    exporter.on_view(view._replace(ranks=(view.ranks[0], view.ranks[1]._replace(state="lost"))))
    samples = scrape(exporter)
    assert value(samples, "pentad_world_size") == 1
    assert len(samples["pentad_heartbeat_timestamp_seconds"]) == 2


def test_a_missing_gpu_reading_has_no_series(exporter: Exporter) -> None:
    exporter.on_ranks_placed(view_of(Mesh(pp=2)))
    exporter.on_gpu_states({0: GPU, 1: GpuState(power=100.0)})
    samples = scrape(exporter)
    assert [s.value for s in samples["pentad_gpu_power_watts"]] == [512.5, 100.0]
    assert value(samples, "pentad_gpu_ecc_errors_total", rank="0", type="uncorrected") == 2
    assert len(samples["pentad_gpu_ecc_errors_total"]) == 1
    assert {s.labels["xid"]: s.value for s in samples["pentad_gpu_xid_errors_total"]} == {"31": 2, "79": 1}
    throttled = {s.labels["reason"]: s.value for s in samples["pentad_gpu_throttled"]}
    assert throttled == {"power": 1, "thermal": 0, "hardware": 0}


def test_exactly_one_state_of_the_run_is_set(exporter: Exporter) -> None:
    exporter.on_view(view_of(Mesh(), state="recovering"))
    states = {s.labels["state"]: s.value for s in scrape(exporter)["pentad_run_state"]}
    assert [state for state, on in states.items() if on] == ["recovering"]
    assert len(states) == 8


def test_counters_are_zero_before_anything_happens(exporter: Exporter) -> None:
    samples = scrape(exporter)
    counters = {name for name, metric in METRICS.items() if metric.kind == "counter" and "gpu" not in name}
    assert counters <= set(samples)
    assert not any(s.value for name in counters for s in samples[name])
    assert value(samples, "pentad_recovery_duration_seconds_count", phase="connect") == 0


def test_skipped_steps_and_rollbacks_are_counted(exporter: Exporter) -> None:
    exporter.on_event({"event": "skip", "step": 12, "loss": 9.0, "grad_norm": 50.0})
    exporter.on_event({"event": "rollback", "step": 12, "to": 10, "skipped_batches": [[10, 3]]})
    samples = scrape(exporter)
    assert value(samples, "pentad_steps_skipped_total") == 1
    assert value(samples, "pentad_steps_discarded_total") == 3


def test_journal_events_are_counted(full: Exporter) -> None:
    samples = scrape(full)
    assert value(samples, "pentad_failures_total", fault="hang", detector="deadline") == 1
    assert sum(s.value for s in samples["pentad_failures_total"]) == 1
    assert value(samples, "pentad_recovery_duration_seconds_sum", phase="place") == 1.5
    assert [value(samples, f"pentad_{k}_total") for k in ("steps_discarded", "checkpoint_bytes")] == [2, 1000]
    assert value(samples, "pentad_checkpoint_last_success_timestamp_seconds", tier="disk") == 1.7e9
    assert [s.value for s in samples["pentad_checkpoint_duration_seconds_sum"]] == [0.25, 0.5, 2.0]
    full.on_event({"event": "checkpoint failed", "time": 1.7e9, "step": 5, "error": "no space"})
    assert value(scrape(full), "pentad_checkpoint_failures_total") == 1


@pytest.mark.parametrize("event", ["start", "place", "fence", "pause", "resume", "stop", "end", "failure", "new"])
def test_other_events_are_ignored(exporter: Exporter, event: str) -> None:
    exporter.on_event({"time": 1.7e9, "event": event})


def test_replayed_steps_are_not_effective_time(exporter: Exporter) -> None:
    exporter._began -= 100
    exporter.on_steps([row(k, step_seconds=10.0) for k in (4, 5, 6, 7, 6, 7)], [()] * 6)
    assert value(scrape(exporter), "pentad_effective_training_time_ratio") == pytest.approx(0.4, rel=0.05)


def test_a_scrape_is_atomic(exporter: Exporter) -> None:
    over = threading.Event()

    def update() -> None:
        while not over.is_set():
            exporter.on_steps([ROW], [spans_of(1, 8)])

    updater = threading.Thread(target=update)
    updater.start()
    try:
        for _ in range(20):
            samples = scrape(exporter)
            steps = value(samples, "pentad_step_duration_seconds_count")
            assert value(samples, "pentad_tokens_total") == 2048 * steps
            assert all(s.value == 2 * steps for s in samples.get("pentad_instruction_duration_seconds_count", []))
    finally:
        over.set()
        updater.join()


@pytest.mark.quiet
def test_an_update_of_64_ranks_takes_under_a_millisecond(exporter: Exporter) -> None:
    """CPU time of this process, which is both client and server."""
    exporter.on_ranks_placed(view := view_of(Mesh(dp=4, pp=16)))
    exporter.on_gpu_states(dict.fromkeys(range(64), GPU))
    spans = spans_of(4, 100)
    assert cost(lambda: exporter.on_steps([ROW], [spans])) < 0.001
    assert cost(lambda: exporter.on_view(view)) < 0.001
    assert cost(lambda: urllib.request.urlopen(f"http://{exporter.address}/metrics").read()) < 0.020


def cost(work: Any) -> float:
    """CPU seconds, the minimum of several runs; a wall clock would include other programs, even in the minimum."""
    times, waits = [], []
    for _ in range(100):
        began, clock = time.process_time(), time.monotonic()
        work()
        times.append(time.process_time() - began)
        waits.append(time.monotonic() - clock)
    assert min(waits) < 0.1
    return min(times)


def test_closing_frees_the_port_and_is_idempotent() -> None:
    exporter = Exporter("a", "127.0.0.1", 0)
    host, _, port = exporter.address.rpartition(":")
    scrape(exporter)
    began = time.monotonic()
    exporter.close()
    exporter.close()
    assert time.monotonic() - began < 1
    again = Exporter("b", host, int(port))
    assert again.address == f"127.0.0.1:{port}"
    again.close()


def test_a_taken_port_is_reported_with_its_owner(exporter: Exporter) -> None:
    port = int(exporter.address.rpartition(":")[2])
    expected = (
        rf"^metrics.port is {port}, but .*pid {os.getpid()}.* has that port .*: expected a free one, or 0 for any$"
    )
    with pytest.raises(PentadError, match=expected):
        Exporter("b", "127.0.0.1", port)


@pytest.mark.parametrize("host", ["192.0.2.7", "no-such-host.invalid", "a..b"])
def test_a_host_that_is_not_this_machine_is_reported(host: str) -> None:
    with pytest.raises(PentadError, match=rf"^metrics.host is '{host}', where nothing can listen \(.*\): expected an "):
        Exporter("b", host, 0)


def test_a_client_that_hangs_up_prints_nothing_to_the_terminal(
    full: Exporter, capfd: pytest.CaptureFixture[str]
) -> None:
    host, _, port = full.address.rpartition(":")
    for request in (b"GET /metrics HTTP/1.1\r\n\r\n", b"", b"\x00\xff\r\n\r\n"):
        with socket.create_connection((host, int(port))) as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # sends RST instead of FIN
            client.sendall(request)
    scrape(full)
    assert capfd.readouterr() == ("", "")


class FakeGauge:
    made: ClassVar[dict[str, "FakeGauge"]] = {}

    def __init__(self, name: str, description: str, tag_keys: tuple[str, ...]) -> None:
        assert (description, tag_keys) == (GAUGES[name], ("job",))
        self.received: list[Any] = []
        self.made[name] = self

    def set(self, value: float, tags: dict[str, str]) -> None:
        self.received.append((value, tags["job"]))


@pytest.fixture
def gauges(monkeypatch: pytest.MonkeyPatch) -> dict[str, FakeGauge]:
    monkeypatch.setattr(ray_metrics, "Gauge", FakeGauge)
    monkeypatch.setattr(FakeGauge, "made", {})
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    return FakeGauge.made


def test_a_few_metrics_are_exported_through_ray(gauges: dict[str, FakeGauge]) -> None:
    watcher = RayMetrics("quick")
    watcher.on_ranks_placed(view_of(Mesh(pp=2)))
    watcher.on_steps([row(2), row(3, loss=None)], [(), ()])
    assert {name: gauge.received for name, gauge in gauges.items()} == {
        "pentad_step": [(3, "quick")],
        "pentad_world_size": [(2, "quick")],
        "pentad_tokens_per_second": [(6826.0, "quick")],
        "pentad_bubble_ratio": [(0.25, "quick")],
    }
    watcher.on_steps([row(4)], [()])
    assert gauges["pentad_loss"].received == [(2.5, "quick")]
    assert set(gauges) == set(GAUGES)


def test_without_ray_nothing_is_exported(gauges: dict[str, FakeGauge], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    watcher = RayMetrics("quick")
    watcher.on_view(view_of(Mesh()))
    watcher.close()
    assert not gauges


def test_an_error_from_ray_is_ignored(gauges: dict[str, FakeGauge], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise ValueError("no")

    monkeypatch.setattr(FakeGauge, "set", refuse)
    RayMetrics("quick").on_steps([ROW], [()])


def test_rays_gauges_have_names_and_descriptions_of_the_exporter() -> None:
    own = {name for name in GAUGES if name in METRICS}
    assert set(GAUGES) - own == {"pentad_tokens_per_second"}
