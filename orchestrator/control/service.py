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
from pentad.orchestrator.monitoring.run_state import OVER, ControlRequests, RunView, makes_progress

HEARTBEAT_SECONDS = 5.0  # a rank that has been silent for longer counts as not serving
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
        """Stores the view and notifies waiting tasks. Never blocks. After the loop has ended, only stores."""
        self.view, self.closed = view or self.view, self.closed or closed
        with suppress(RuntimeError):  # the loop is closed
            self.loop.call_soon_threadsafe(self._notify)

    async def until(self, reached: Callable[[ViewQueue], bool]) -> RunView:
        """The first view for which `reached` holds. Raises Refused if the run ends before."""
        while True:
            changed = self.changed
            if reached(self):
                return self.view
            if self.over:
                over = f"run {self.view.run} is over at step {self.view.step}"
                raise Refused(grpc.StatusCode.FAILED_PRECONDITION, f"{over}: expected a live one")
            await changed.wait()

    def _notify(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()


def _request(ask: Callable[[ControlRequests], None], reached: Callable[[ViewQueue], bool]) -> Callable[..., Any]:
    """A method that passes a request on to the driver and answers once the run has `reached` what was asked for."""

    async def answer(self: ControlMethods, request: Any, _write: _Write) -> Any:
        await self.check_request(request)
        ask(self.requests)
        view = await self.views.until(reached)
        return _outcome(view, state="stopped" if self.views.over and view.state not in OVER else view.state)

    return answer


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

    Pause = _request(ControlRequests.pause, lambda views: views.view.state == "paused")
    Resume = _request(ControlRequests.resume, lambda views: views.view.state != "paused")
    Stop = _request(ControlRequests.stop, lambda views: views.over)
    Abort = _request(ControlRequests.abort, lambda views: views.over)

    async def Checkpoint(self, request: Any, _write: _Write) -> Any:
        view = await self.check_request(request)
        # Polls: waiting would hold a thread, even after the caller hangs up.
        while (saved := self.requests.checkpoint(view.step, 0.0)) is None:
            await self.views.until(lambda views: not views.over)
            await asyncio.sleep(_POLL_SECONDS)
        return _outcome(self.views.view, step=saved)

    async def check_request(self, request: Any) -> RunView:
        """The current view. Raises Refused if the run is over or in another generation than the request names."""
        view = await self.views.until(lambda views: not views.over)
        if request.generation not in (0, view.generation):
            found = f"generation is {request.generation}, but run {view.run} is in {view.generation}"
            raise Refused(grpc.StatusCode.FAILED_PRECONDITION, f"{found}: expected that or 0 for any")
        return view


class HealthMethods:
    """The methods of grpc.health.v1.Health.

    grpc's own servicer holds a lock while it writes to a watcher, so one slow watcher blocks all others; here each call
    reads the view by itself.
    """

    def __init__(self, views: ViewQueue) -> None:
        self.views = views

    async def Check(self, request: Any, _write: _Write) -> Any:
        found = self._serving(request.service)
        if found == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN:
            expected = "expected '', pentad.v1.Control or pentad.rank.N"
            raise Refused(grpc.StatusCode.NOT_FOUND, f"service is unknown: {expected}")
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
    healthy = not closed and makes_progress(view)
    ranks = {
        f"pentad.rank.{rank.rank}": live and rank.state in _ANSWERING and now - rank.heartbeat < HEARTBEAT_SECONDS
        for rank in view.ranks
    }
    return {"": healthy, SERVICE: healthy, **ranks}


def _outcome(view: RunView, **other: Any) -> Any:
    facts = {"run": view.run, "state": view.state, "step": view.step, "generation": view.generation}
    return MESSAGES["Outcome"](**{**facts, **other})
