"""Starts what watches a run: its control service, the Prometheus exporter, Ray's dashboard and metrics, and loggers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager

from pentad.orchestrator.config.config import RunConfig
from pentad.orchestrator.control.server import ControlServer
from pentad.orchestrator.diagnosis.slow_ranks import SlowRankWatch
from pentad.orchestrator.loggers.loggers import Loggers
from pentad.orchestrator.monitoring.event_bus import EventBus
from pentad.orchestrator.monitoring.exporter import Exporter
from pentad.orchestrator.monitoring.ray_job import announce
from pentad.orchestrator.monitoring.ray_metrics import RayMetrics
from pentad.orchestrator.monitoring.ray_timeline import RayTimeline
from pentad.orchestrator.monitoring.run_state import ControlRequests


@contextmanager
def monitored(config: RunConfig, bus: EventBus, requests: ControlRequests) -> Iterator[None]:
    """Runs the watchers for the length of the block. Raises PentadError when a port is taken."""
    section = config.metrics
    with ExitStack() as stack:
        exporter = stack.enter_context(closing(Exporter(config.run.name, section.host, section.port)))
        control = ControlServer(bus.folder.path, section.host, section.control_port, requests)
        stack.enter_context(closing(control))
        metrics = stack.enter_context(closing(RayMetrics(config.run.name)))
        timeline = stack.enter_context(closing(RayTimeline(section.timeline_steps, bus.display.note)))
        bus.watchers += [control, exporter, metrics, timeline, SlowRankWatch(bus)]
        endpoints = {"control": control.address, "metrics": exporter.address}
        bus.update(endpoints=bus.view.endpoints | endpoints)
        announce(bus.view.endpoints)
        bus.watchers.append(stack.enter_context(closing(Loggers(config, bus.folder, bus.view.step, bus.display.note))))
        yield
