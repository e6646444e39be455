"""HTTP servers in threads of their own, among them the one for Prometheus scrapes and health probes."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import Any

from prometheus_client import CollectorRegistry, MetricsHandler
from prometheus_client.registry import Collector

from pentad.orchestrator.cluster.ports import listen_error
from pentad.schedules.ir.errors import PentadError

POLL_SECONDS = 0.05  # upper bound on the time `close` takes
REQUEST_SECONDS = 10.0  # for a slow client to send its request
MOST_CLIENTS = 16  # served at once, each in its own thread
HEALTH_PATH = "/health"


class HttpServer:
    """Answers requests in threads of its own from construction until `close`, over HTTPS if given `tls`. Port 0 means
    any free port; `key` is the configuration key of the port.

    Raises PentadError if nothing can listen there.
    """

    def __init__(
        self, key: str, host: str, port: int, handler: type[BaseHTTPRequestHandler], tls: ssl.SSLContext | None = None
    ) -> None:
        try:
            family, *_, at = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
            kind = type("Server", (_Server,), {"address_family": family, "tls": tls})
            self._server = kind(at[:2], type("Handler", (handler,), {"timeout": REQUEST_SECONDS}))
        except (OSError, UnicodeError) as error:
            raise PentadError(listen_error(key, host, port, error)) from None
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(POLL_SECONDS,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Frees the port. Idempotent."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()


class MetricsServer(HttpServer):
    """Serves the metrics that `values` collects. /health has status 200 while `is_healthy`, else 503."""

    def __init__(self, values: Collector, host: str, port: int, is_healthy: Callable[[], bool]) -> None:
        registry = CollectorRegistry()
        registry.register(values)
        handler = type("Handler", (_Handler,), {"registry": registry, "is_healthy": staticmethod(is_healthy)})
        super().__init__("metrics.port", host, port, handler)
        self.address = f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"


class _Handler(MetricsHandler):
    is_healthy: Callable[[], bool]

    def do_GET(self) -> None:
        if self.path != HEALTH_PATH:
            return super().do_GET()
        self.send_response(200 if self.is_healthy() else 503)
        self.send_header("Content-Length", "0")
        self.end_headers()


class _Server(ThreadingHTTPServer):
    """Hangs up on further clients while MOST_CLIENTS are being served."""

    tls: ssl.SSLContext | None

    def __init__(self, *arguments: Any) -> None:
        self.slots = threading.BoundedSemaphore(MOST_CLIENTS)
        super().__init__(*arguments)

    def get_request(self) -> Any:
        """Accepts a client. A TLS handshake is left to the first read, in the client's own thread."""
        request, client_address = super().get_request()
        if self.tls is not None:
            request = self.tls.wrap_socket(request, server_side=True, do_handshake_on_connect=False)
        return request, client_address

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
        """Ignores clients that hang up, so that nothing is printed on the run's terminal."""
