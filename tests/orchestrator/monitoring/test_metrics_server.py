"""The metrics server: probes, and misbehaving clients."""

from __future__ import annotations

import http.client
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from urllib.request import urlopen

import pytest
from controls import seen

from pentad.orchestrator.monitoring.exporter import Exporter
from pentad.orchestrator.monitoring.metrics_server import MOST_CLIENTS


@pytest.fixture
def exporter() -> Iterator[Exporter]:
    with closing(Exporter("trial", "127.0.0.1", 0)) as made:
        yield made


def test_probes_learn_whether_the_run_makes_progress(exporter: Exporter) -> None:
    well = seen()
    lost = tuple(rank._replace(state="lost") for rank in well.ranks)
    waits, failed = well._replace(state="recovering", ranks=lost), well._replace(state="failed")
    for view, status in ((well, 200), (waits, 503), (well, 200), (failed, 503)):
        exporter.on_view(view)
        connection = http.client.HTTPConnection(exporter.address, timeout=5)
        with closing(connection):
            connection.request("GET", "/health")
            assert connection.getresponse().status == status


@pytest.mark.slow
def test_clients_that_send_nothing_take_a_bounded_number_of_threads(exporter: Exporter) -> None:
    """Connections beyond the limit are closed; when others end, there is room again."""
    host, _, port = exporter.address.rpartition(":")
    before = threading.active_count()
    with ExitStack() as stack:
        silent = [stack.enter_context(socket.create_connection((host, int(port)), 5)) for _ in range(3 * MOST_CLIENTS)]
        assert silent[-1].recv(1) == b""
        assert threading.active_count() <= before + MOST_CLIENTS
    until = time.monotonic() + 10
    while threading.active_count() > before and time.monotonic() < until:
        time.sleep(0.01)
    assert urlopen(f"http://{exporter.address}/metrics", timeout=5).status == 200
