"""The control service of a run: a Watcher that answers over gRPC, from threads of its own, what it was last told.

It says where it listens in control.json of the run's folder, which only the run's user may read.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from pentad.orchestrator.cluster.ports import refuse_taken
from pentad.orchestrator.control.control_messages import ENDPOINT
from pentad.orchestrator.control.interceptors import make_server
from pentad.orchestrator.control.service import Board, Health, Methods
from pentad.orchestrator.monitoring.run_state import ControlRequests, RunView
from pentad.orchestrator.monitoring.runfolder import _whole
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.simulate.timeline import Span

GRACE_SECONDS = 1.0  # for the last answers of a run that is over
_PATIENCE_SECONDS = 10.0  # with grpc, which takes milliseconds


class Control:
    """Listens from the start until `close`; `address` is its HOST:PORT."""

    def __init__(self, folder: Path, host: str, port: int, wishes: ControlRequests) -> None:
        """Port 0 is a free one. Raises PentadError when the port is taken, or the folder cannot be written."""
        refuse_taken("metrics.control_port", host, port)  # grpc itself would fail with many lines on stderr
        self._wishes, self._file = wishes, folder / ENDPOINT
        self._board = Board(RunView(folder.name, str(folder), "starting", 0, 0, 0, "", "", ""))
        self._thread = threading.Thread(target=self._board.loop.run_forever, name="control", daemon=True)
        self._thread.start()
        try:
            token = secrets.token_urlsafe(32)
            self._server, bound = self._in_loop(self._listen(_joined(host, port), token))
            self.address = _joined(_reachable(host), bound)
            _write(self._file, {"address": self.address, "token": token, "pid": os.getpid()})
        except BaseException:
            self.close()
            raise

    def plan(self, view: RunView) -> None:
        self._board.post(view)

    def steps(self, rows: Sequence[dict[str, Any]], spans: Sequence[tuple[Span, ...]]) -> None:
        pass

    def view(self, view: RunView) -> None:
        self._board.post(view)

    def event(self, entry: dict[str, Any]) -> None:
        pass

    def close(self) -> None:
        """Answers those who wait, and is gone, with its file, within about a second; a second call does nothing."""
        if self._board.loop.is_closed():
            return
        self._wishes.over()
        self._board.post(closed=True)
        with suppress(OSError):
            self._file.unlink(missing_ok=True)
        if server := getattr(self, "_server", None):
            with suppress(TimeoutError):
                self._in_loop(server.stop(GRACE_SECONDS))
        self._board.loop.call_soon_threadsafe(self._board.loop.stop)
        self._thread.join()
        self._board.loop.close()

    def _in_loop(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._board.loop).result(_PATIENCE_SECONDS)

    async def _listen(self, address: str, token: str) -> tuple[Any, int]:
        server = make_server(Methods(self._board, self._wishes), Health(self._board), token)
        try:
            port = server.add_insecure_port(address)
        except RuntimeError:  # someone was faster
            raise PentadError(f"metrics.control_port is {address}, which is taken: expected a free one") from None
        await server.start()
        return server, port


def _joined(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _reachable(host: str) -> str:
    """Where others reach what listens on `host`: '0.0.0.0' and '::' are all of this machine's addresses."""
    if host not in ("0.0.0.0", "::"):
        return host
    family, elsewhere = (socket.AF_INET, "192.0.2.1") if host == "0.0.0.0" else (socket.AF_INET6, "2001:db8::1")
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((elsewhere, 9))  # sends nothing: asks which address this machine would send from
            return probe.getsockname()[0]
    except OSError:
        return socket.gethostname()


def _write(path: Path, endpoint: dict[str, Any]) -> None:
    """Whole or not at all, never for others to read; `host` tells a client elsewhere whose loopback is meant."""
    text = json.dumps({**endpoint, "host": socket.gethostname()}) + "\n"
    with _whole(path) as partial:
        partial.unlink(missing_ok=True)
        with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            file.write(text)
