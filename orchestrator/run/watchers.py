"""Starts what watches a run: its control service, the Prometheus exporter, and Ray's dashboard and metrics."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from pentad.orchestrator.config.config import RunConfig
from pentad.orchestrator.control.server import ControlServer
from pentad.orchestrator.monitoring.event_bus import EventBus
from pentad.orchestrator.monitoring.exporter import Exporter
from pentad.orchestrator.monitoring.ray_job import announce
from pentad.orchestrator.monitoring.ray_metrics import RayMetrics
from pentad.orchestrator.monitoring.ray_timeline import RayTimeline
from pentad.orchestrator.monitoring.run_state import ControlRequests


@contextmanager
def watched(config: RunConfig, bus: EventBus, requests: ControlRequests) -> Iterator[None]:
    """Runs the watchers for the length of the block. Raises PentadError when a port is taken."""
    section = config.metrics
    with ExitStack() as stack:
        exporter = Exporter(config.run.name, section.host, section.port)
        stack.callback(exporter.close)
        control = ControlServer(bus.folder.path, section.host, section.control_port, requests)
        stack.callback(control.close)
        metrics, timeline = RayMetrics(config.run.name), RayTimeline(section.timeline_steps, bus.display.note)
        stack.callback(metrics.close)
        stack.callback(timeline.close)
        bus.watchers += [control, exporter, metrics, timeline]
        bus.on_gpu_states = exporter.set_gpu_states
        endpoints = {"control": control.address, "metrics": exporter.address}
        bus.update(endpoints=bus.view.endpoints | endpoints)
        announce(bus.view.endpoints)
        yield
