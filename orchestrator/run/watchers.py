"""Who watches a run: its control service, the exporter, Ray's dashboard and Ray's metrics."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from pentad.orchestrator.cluster.ports import refuse_taken
from pentad.orchestrator.config.config import RunConfig
from pentad.orchestrator.config.sections import MetricsSection
from pentad.orchestrator.control.server import Control
from pentad.orchestrator.jobs.jobs import announce
from pentad.orchestrator.monitoring.event_bus import EventBus
from pentad.orchestrator.monitoring.exporter import Exporter
from pentad.orchestrator.monitoring.ray_metrics import RayMetrics
from pentad.orchestrator.monitoring.ray_timeline import RayTimeline
from pentad.orchestrator.monitoring.run_state import ControlRequests


def refuse_taken_ports(section: MetricsSection) -> None:
    """Raises PentadError for a port that `watched` could not have, before anything is started or written."""
    refuse_taken("metrics.port", section.host, section.port)
    refuse_taken("metrics.control_port", section.host, section.control_port)


@contextmanager
def watched(config: RunConfig, news: EventBus, wishes: ControlRequests) -> Iterator[None]:
    """Starts the watchers of a run, which end with it. Raises PentadError when a port is taken."""
    section = config.metrics
    with ExitStack() as stack:
        exporter = Exporter(config.run.name, section.host, section.port)
        stack.callback(exporter.close)
        control = Control(news.folder.path, section.host, section.control_port, wishes)
        stack.callback(control.close)
        metrics, timeline = RayMetrics(config.run.name), RayTimeline(section.timeline_steps, news.display.note)
        stack.callback(metrics.close)
        stack.callback(timeline.close)
        news.watchers += [control, exporter, metrics, timeline]
        news.gpus = exporter.gpus
        ends = {"control": control.address, "metrics": exporter.address}
        news.say(endpoints=news.view.endpoints | ends)
        announce(news.view.endpoints)
        yield
