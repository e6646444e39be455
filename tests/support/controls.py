"""A live control service without a run, and views of made-up runs."""

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from grpc_health.v1 import health_pb2, health_pb2_grpc

from pentad.orchestrator.control.control_client import Client
from pentad.orchestrator.control.server import ControlServer
from pentad.orchestrator.monitoring.run_state import ControlRequests, RankView, RunView
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.spec.mesh import Coordinates

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class CountedRequests(ControlRequests):
    """Counts the requests that have arrived."""

    received = 0

    def checkpoint(self, step: int, timeout_seconds: float) -> int | None:
        self.received += 1
        return super().checkpoint(step, timeout_seconds)

    def _set(self, **flags: bool) -> None:
        super()._set(**flags)
        self.received += 1


class Served(Client):
    """A live service, and a client of it."""

    def __init__(self, folder: Path) -> None:
        self.requests = CountedRequests()
        self.control = ControlServer(folder, "127.0.0.1", 0, self.requests)
        self.endpoint = json.loads((folder / "control.json").read_text())
        super().__init__(folder, self.endpoint)
        self.health = health_pb2_grpc.HealthStub(self._channel)

    def serves(self, service: str) -> bool:
        return self.health.Check(health_pb2.HealthCheckRequest(service=service), timeout=5).status == SERVING


def rank(number: int, state: str = "running", age: float = 0.0) -> RankView:
    at = Coordinates(0, number, 0, 0, 0)
    return RankView(number, at, "10.0.0.1", 100 + number, -1, state, 4, "0F1", time.monotonic() - age)


def seen(state: str = "running", *ranks: RankView, **more: Any) -> RunView:
    facts = {"loss": 2.5, "tokens_per_second": 1e3, "ranks": ranks or (rank(0), rank(1)), **more}
    endpoints = {"control": "127.0.0.1:1", "dashboard": "http://127.0.0.1:2"}
    view = RunView("trial", "runs/trial", state, 5, 60, 2, "dp1 pp2", "zb-h2", "abc", endpoints=endpoints)
    return view._replace(**facts)


@contextmanager
def serving(folder: Path) -> Iterator[Served]:
    """A service that has received views of a run of two ranks."""
    made = Served(folder)
    made.control.on_view(seen())
    try:
        yield made
    finally:
        made.close()
        made.control.close()


def connected(folder: Path) -> Client:
    """A client of the service in a folder, which need not be a run folder."""
    return Client(folder, json.loads((folder / "control.json").read_text()))


def once_requested(served: Served, do: Callable[..., object], *arguments: object) -> threading.Thread:
    """Calls `do` in another thread once the next request has arrived."""
    before = served.requests.received
    return _once(lambda: served.requests.received > before, do, *arguments)


def once_printed(do: Callable[..., object], *arguments: object) -> threading.Thread:
    """Calls `do` in another thread once this one has printed its first line, under `capsys`."""
    return _once(lambda: "\n" in cast(Any, sys.stdout).getvalue(), do, *arguments)


def _once(holds: Callable[[], bool], do: Callable[..., object], *arguments: object) -> threading.Thread:
    def wait() -> None:
        until = time.monotonic() + 30
        while not holds() and time.monotonic() < until:
            time.sleep(0.01)
        do(*arguments)

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


def plain_view(view: RunView) -> dict[str, Any]:
    """A view as `pentad status --json` prints it, built independently of the protobuf messages."""
    now = time.monotonic()
    ranks = [
        {
            **{name: getattr(rank, name) for name in ("rank", "pid", "node", "gpu")},
            "coordinates": rank.coordinates._asdict(),
            **{name: getattr(rank, name) for name in ("state", "step", "instruction")},
            "heartbeat_age_seconds": round(max(0.0, now - rank.heartbeat), 3),
        }
        for rank in view.ranks
    ]
    evaluations = [{"data": each.data, "step": each.step, "loss": each.loss} for each in view.evaluations]
    return {**view._asdict(), "ranks": ranks, "evaluations": evaluations}


def first_view(served: Served) -> dict[str, Any]:
    """The first view of a watcher, which the server has room for once it notices that another watcher is gone."""
    until = time.monotonic() + 20
    while True:
        try:
            return next(served.watch())
        except PentadError:
            assert time.monotonic() < until
            time.sleep(0.02)
