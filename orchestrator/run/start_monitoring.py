"""Starts a run's watchers: control service, Prometheus exporter, page, Ray's dashboard and metrics, and loggers."""

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
from pentad.orchestrator.page.page_data import PageData
from pentad.orchestrator.page.page_server import PageServer


@contextmanager
def monitored(config: RunConfig, bus: EventBus, requests: ControlRequests) -> Iterator[None]:
    """Runs the watchers for the duration of the block. Raises PentadError if a port is taken."""
    section = config.metrics
    with ExitStack() as stack:
        exporter = stack.enter_context(closing(Exporter(config.run.name, section.host, section.port)))
        control = ControlServer(bus.folder.path, section.host, section.control_port, requests)
        stack.enter_context(closing(control))
        metrics = stack.enter_context(closing(RayMetrics(config.run.name)))
        timeline = stack.enter_context(closing(RayTimeline(section.timeline_steps, bus.display.note)))
        bus.watchers += [control, exporter, metrics, timeline, SlowRankWatch(bus)]
        page = PageData(bus, section.timeline_steps)
        server = PageServer(page, section.host, section.page_port, control.token, control.certificate)
        stack.enter_context(closing(server))
        bus.watchers.append(page)
        bus.display.note(f"the run's page: {server.url} (with its token: `pentad page {config.run.name}`)")
        endpoints = {"control": control.address, "metrics": exporter.address, "page": server.url}
        bus.update(endpoints=bus.view.endpoints | endpoints)
        announce(bus.view.endpoints)
        bus.watchers.append(stack.enter_context(closing(Loggers(config, bus.folder, bus.view.step, bus.display.note))))
        yield
