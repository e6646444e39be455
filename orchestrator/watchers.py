"""Who watches a run: its control service, the exporter, Ray's dashboard."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from pentad.orchestrator.config import RunConfig
from pentad.orchestrator.control import Control
from pentad.orchestrator.news import News
from pentad.orchestrator.watch import Wishes


@contextmanager
def watched(config: RunConfig, news: News, wishes: Wishes) -> Iterator[None]:
    """Starts the watchers of a run, which end with it. Raises PentadError when a port is taken."""
    section = config.metrics
    with ExitStack() as stack:
        control = Control(news.folder.path, section.host, section.control_port, wishes)
        stack.callback(control.close)
        news.watchers.append(control)
        news.say(endpoints=news.view.endpoints | {"control": control.address})
        yield
