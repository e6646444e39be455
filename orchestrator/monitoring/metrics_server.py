"""The HTTP server that Prometheus scrapes and probes ask, in threads of its own."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from http.server import ThreadingHTTPServer
from socketserver import TCPServer
from typing import Any

from prometheus_client import CollectorRegistry, MetricsHandler
from prometheus_client.registry import Collector

from pentad.orchestrator.cluster.ports import listen_error
from pentad.schedules.ir.errors import PentadError

POLL_SECONDS = 0.05  # upper bound on the time `close` takes
REQUEST_SECONDS = 10.0  # for a slow client to send its request
MOST_CLIENTS = 16  # at once; each has a thread
HEALTH_PATH = "/health"


class MetricsServer:
    """Serves what `values` collects, from construction until `close`. Port 0 means a free one. /health has status 200
    while `is_healthy`, else 503.

    Raises PentadError when nothing can listen there.
    """

    def __init__(self, values: Collector, host: str, port: int, is_healthy: Callable[[], bool]) -> None:
        registry = CollectorRegistry()
        registry.register(values)
        facts = {"registry": registry, "timeout": REQUEST_SECONDS, "is_healthy": staticmethod(is_healthy)}
        handler = type("Handler", (_Handler,), facts)
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


class _Handler(MetricsHandler):
    is_healthy: Callable[[], bool]

    def do_GET(self) -> None:
        if self.path != HEALTH_PATH:
            return super().do_GET()
        self.send_response(200 if self.is_healthy() else 503)
        self.send_header("Content-Length", "0")
        self.end_headers()


class _Server(ThreadingHTTPServer):
    """Hangs up on whoever comes while MOST_CLIENTS are served."""

    def __init__(self, *arguments: Any) -> None:
        self.slots = threading.BoundedSemaphore(MOST_CLIENTS)
        super().__init__(*arguments)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self.slots.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.slots.release()

    def server_bind(self) -> None:
        """Skips HTTPServer's reverse DNS lookup."""
        TCPServer.server_bind(self)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignores clients that hang up: nothing is printed on the run's terminal."""
