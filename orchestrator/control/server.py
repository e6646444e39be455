"""The control service of a run: a Watcher that serves the newest view of the run over gRPC, from a thread of its own.

Its address and token are in control.json in the run's folder, which only the run's user may read, along with its
certificate if other machines can reach it.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import socket
import threading
from contextlib import suppress
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from pentad.orchestrator.cluster.ports import require_free
from pentad.orchestrator.control.certificate import Certificate, make_certificate
from pentad.orchestrator.control.control_messages import ENDPOINT
from pentad.orchestrator.control.interceptors import make_server
from pentad.orchestrator.control.service import ControlMethods, HealthMethods, ViewQueue
from pentad.orchestrator.monitoring.run_state import ControlRequests, RunView, Watcher
from pentad.orchestrator.records.run_files import WAIT_SECONDS, atomic_file
from pentad.schedules.ir.errors import PentadError
from pentad.workers.background import within

GRACE_SECONDS = 1.0  # for the last answers of a run that has ended
_TIMEOUT_SECONDS = 10.0  # for grpc, which normally takes milliseconds


class ControlServer(Watcher):
    """Listens from construction until `close`; `address` is its HOST:PORT, and `certificate` is None on loopback."""

    def __init__(self, folder: Path, host: str, port: int, requests: ControlRequests) -> None:
        """Port 0 means any free port. Raises PentadError if the port is taken or the folder cannot be written."""
        require_free("metrics.control_port", host, port)  # grpc itself would print many lines on stderr
        self._requests, self._file = requests, folder / ENDPOINT
        self._views = ViewQueue(RunView(folder.name, str(folder), "starting", 0, 0, 0, "", "", ""))
        self._thread = threading.Thread(target=self._views.loop.run_forever, name="control", daemon=True)
        self._thread.start()
        try:
            self.token = token = secrets.token_urlsafe(32)
            self.certificate = certificate = None if _is_loopback(host) else make_certificate()
            self._server, bound = self._in_loop(self._listen(host_port(host, port), token, certificate))
            self.address = host_port(reachable(host), bound)
            trusted = {} if certificate is None else {"certificate": certificate.text.decode()}
            _write(self._file, {"address": self.address, "token": token, "pid": os.getpid(), **trusted})
        except BaseException:
            self.close()
            raise

    def on_view(self, view: RunView) -> None:
        self._views.post(view)

    def close(self) -> None:
        """Answers pending calls and stops within about a second; removes control.json. Idempotent."""
        if self._views.loop.is_closed():
            return
        self._requests.close()
        self._views.post(closed=True)
        with suppress(OSError):  # including TimeoutError, as the disk may hang
            within(WAIT_SECONDS, partial(self._file.unlink, missing_ok=True))
        if server := getattr(self, "_server", None):
            with suppress(TimeoutError):
                self._in_loop(server.stop(GRACE_SECONDS))
        self._views.loop.call_soon_threadsafe(self._views.loop.stop)
        self._thread.join()
        self._views.loop.close()

    def _in_loop(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._views.loop).result(_TIMEOUT_SECONDS)

    async def _listen(self, address: str, token: str, certificate: Certificate | None) -> tuple[Any, int]:
        server = make_server(ControlMethods(self._views, self._requests), HealthMethods(self._views), token)
        try:
            secure, insecure = server.add_secure_port, server.add_insecure_port
            port = insecure(address) if certificate is None else secure(address, certificate.credentials)
        except RuntimeError:  # taken since the check above
            raise PentadError(f"metrics.control_port is {address}, which is taken: expected a free one") from None
        await server.start()
        return server, port


def host_port(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _is_loopback(host: str) -> bool:
    """Whether only processes on this machine can reach what listens at `host`."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        return all(ip_address(each[4][0]).is_loopback for each in found)
    except (OSError, ValueError):
        return False


def reachable(host: str) -> str:
    """An address at which others can reach what listens at `host`; '0.0.0.0' and '::' mean all addresses of this
    machine."""
    if host not in ("0.0.0.0", "::"):
        return host
    family, remote = (socket.AF_INET, "192.0.2.1") if host == "0.0.0.0" else (socket.AF_INET6, "2001:db8::1")
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((remote, 9))  # sends nothing, but selects the address that this machine would send from
            return probe.getsockname()[0]
    except OSError:
        return socket.gethostname()


def _write(path: Path, endpoint: dict[str, Any]) -> None:
    """Writes the file atomically, readable by the user only. It also has this machine's `host` name, so that clients on
    other machines see whose loopback an address is."""
    text = json.dumps({**endpoint, "host": socket.gethostname()}) + "\n"
    with atomic_file(path) as partial:
        partial.unlink(missing_ok=True)
        partial.touch(0o600, exist_ok=False)
        partial.write_text(text, encoding="utf-8")
