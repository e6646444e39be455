"""The HTTP server that Prometheus scrapes, in threads of its own."""

from __future__ import annotations

import socket
import threading
from http.server import ThreadingHTTPServer
from socketserver import TCPServer
from typing import Any

from prometheus_client import CollectorRegistry, MetricsHandler
from prometheus_client.registry import Collector

from pentad.orchestrator.cluster.ports import listen_error
from pentad.schedules.ir.errors import PentadError

POLL_SECONDS = 0.05  # upper bound on the time `close` takes
REQUEST_SECONDS = 10.0  # for a slow client to send its request


class MetricsServer:
    """Serves what `values` collects, from construction until `close`. Port 0 means a free one.

    Raises PentadError when nothing can listen there.
    """

    def __init__(self, values: Collector, host: str, port: int) -> None:
        registry = CollectorRegistry()
        registry.register(values)
        handler = type("Handler", (MetricsHandler,), {"registry": registry, "timeout": REQUEST_SECONDS})
        try:
            family, *_, at = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
            kind = type("Server", (_Server,), {"address_family": family})
            self._server = kind(at[:2], handler)
        except (OSError, UnicodeError) as error:
            raise PentadError(listen_error("metrics.port", host, port, error)) from None
        name = f"[{host}]" if ":" in host else host
        self.address = f"{name}:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(POLL_SECONDS,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Frees the port. Idempotent."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()


class _Server(ThreadingHTTPServer):
    def server_bind(self) -> None:
        """Skips HTTPServer's reverse DNS lookup."""
        TCPServer.server_bind(self)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignores clients that hang up: nothing is printed on the run's terminal."""
