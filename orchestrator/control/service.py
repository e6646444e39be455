"""The methods of the control service and of gRPC's health service, answered from the newest view of the run.

Everything runs in the service's event loop; only `ViewQueue.post` is called from other threads.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import grpc
from grpc_health.v1 import health_pb2

from pentad.orchestrator.control.control_messages import MESSAGES, SERVICE, status_of
from pentad.orchestrator.monitoring.run_state import ControlRequests, RunView

OVER = ("finished", "stopped", "failed")
HEARTBEAT_SECONDS = 5.0  # a rank that has been silent for longer is not serving
_WATCH_SECONDS = 0.5  # between two answers of WatchStatus
_AGE_SECONDS = 1.0  # between two checks of heartbeats
_POLL_SECONDS = 0.1  # between two checks for a committed checkpoint
_ANSWERING = ("running", "waiting", "idle")
_Write = Callable[[Any], Awaitable[None]]


class Refused(Exception):
    """Ends a call with a status code and one sentence."""

    def __init__(self, code: grpc.StatusCode, sentence: str) -> None:
        super().__init__(sentence)
        self.code = code


class ViewQueue:
    """The newest view of the run. Any thread posts views; tasks of the event loop await changes.

    `changed` is set by the next post and replaced by a new event: fetch it before reading `view` to miss no change.
    """

    def __init__(self, view: RunView) -> None:
        self.view, self.closed = view, False
        self.loop = asyncio.new_event_loop()
        self.changed = asyncio.Event()

    @property
    def over(self) -> bool:
        return self.closed or self.view.state in OVER

    def post(self, view: RunView | None = None, *, closed: bool = False) -> None:
        """Never blocks. After the loop has ended, only stores the view."""
        self.view, self.closed = view or self.view, self.closed or closed
        with suppress(RuntimeError):  # the loop is closed
            self.loop.call_soon_threadsafe(self._notify)

    async def until(self, reached: Callable[[RunView], bool]) -> RunView:
        """The first view for which `reached` holds. Raises Refused when the run ends before."""
        while True:
            changed = self.changed
            if reached(self.view):
                return self.view
            if self.over:
                raise Refused(
                    grpc.StatusCode.FAILED_PRECONDITION,
                    f"run {self.view.run} is over at step {self.view.step}: expected a live one",
                )
            await changed.wait()

    def _notify(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()


class ControlMethods:
    """The methods of pentad.v1.Control, named as in control.proto."""

    def __init__(self, views: ViewQueue, requests: ControlRequests) -> None:
        self.views, self.requests = views, requests

    async def GetStatus(self, _request: Any, _write: _Write) -> Any:
        return status_of(self.views.view)

    async def WatchStatus(self, _request: Any, write: _Write) -> None:
        sent = None
        while True:
            changed, over, view = self.views.changed, self.views.over, self.views.view
            if view != sent:
                await write(status_of(view))
                sent = view
            if over:
                return
            await asyncio.gather(changed.wait(), asyncio.sleep(_WATCH_SECONDS))

    async def Pause(self, request: Any, _write: _Write) -> Any:
        await self._check_request(request)
        self.requests.pause()
        return _outcome(await self.views.until(lambda view: view.state == "paused"))

    async def Resume(self, request: Any, _write: _Write) -> Any:
        await self._check_request(request)
        self.requests.resume()
        return _outcome(await self.views.until(lambda view: view.state != "paused"))

    async def Checkpoint(self, request: Any, _write: _Write) -> Any:
        view = await self._check_request(request)
        # Polls: waiting would hold a thread, and a caller that hangs up would leave it behind.
        while (saved := self.requests.checkpoint(view.step, 0.0)) is None:
            await self.views.until(lambda _: not self.views.over)
            await asyncio.sleep(_POLL_SECONDS)
        return _outcome(self.views.view, step=saved)

    async def Stop(self, request: Any, _write: _Write) -> Any:
        await self._check_request(request)
        self.requests.stop()
        return await self._ended()

    async def Abort(self, request: Any, _write: _Write) -> Any:
        await self._check_request(request)
        self.requests.abort()
        return await self._ended()

    async def _ended(self) -> Any:
        view = await self.views.until(lambda _: self.views.over)
        return _outcome(view, state=view.state if view.state in OVER else "stopped")

    async def _check_request(self, request: Any) -> RunView:
        """The present view. Raises Refused when the run is over or in another generation than the request names."""
        view = await self.views.until(lambda _: not self.views.over)
        if request.generation not in (0, view.generation):
            found = f"generation is {request.generation}, but run {view.run} is in {view.generation}"
            sentence = f"{found}: expected that or 0 for any"
            raise Refused(grpc.StatusCode.FAILED_PRECONDITION, sentence)
        return view


class HealthMethods:
    """The methods of grpc.health.v1.Health.

    grpc's own servicer holds a lock while it writes to a watcher, so one slow watcher blocks all; here each call reads
    the view by itself.
    """

    def __init__(self, views: ViewQueue) -> None:
        self.views = views

    async def Check(self, request: Any, _write: _Write) -> Any:
        found = self._serving(request.service)
        if found == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN:
            raise Refused(
                grpc.StatusCode.NOT_FOUND, "service is unknown: expected '', pentad.v1.Control or pentad.rank.N"
            )
        return health_pb2.HealthCheckResponse(status=found)

    async def Watch(self, request: Any, write: _Write) -> None:
        sent = None
        while True:
            changed, closed = self.views.changed, self.views.closed
            if (found := self._serving(request.service)) != sent:
                await write(health_pb2.HealthCheckResponse(status=found))
                sent = found
            if closed:
                return
            with suppress(TimeoutError):  # heartbeats age even without a new view
                await asyncio.wait_for(changed.wait(), _AGE_SECONDS)

    def _serving(self, service: str) -> int:
        serving = healths(self.views.view, closed=self.views.closed, now=time.monotonic()).get(service)
        kinds = health_pb2.HealthCheckResponse
        return kinds.SERVICE_UNKNOWN if serving is None else kinds.SERVING if serving else kinds.NOT_SERVING


def healths(view: RunView, *, closed: bool, now: float) -> dict[str, bool]:
    """Whether each service is serving, by name, at the monotonic second `now`."""
    live = not closed and view.state not in OVER
    healthy = live and not (view.state == "recovering" and any(rank.state == "lost" for rank in view.ranks))
    ranks = {
        f"pentad.rank.{rank.rank}": live and rank.state in _ANSWERING and now - rank.heartbeat < HEARTBEAT_SECONDS
        for rank in view.ranks
    }
    return {"": healthy, SERVICE: healthy, **ranks}


def _outcome(view: RunView, **other: Any) -> Any:
    facts = {"run": view.run, "state": view.state, "step": view.step, "generation": view.generation}
    return MESSAGES["Outcome"](**{**facts, **other})
