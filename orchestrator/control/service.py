"""What the control service answers: to Control's methods and to probes of health, all from the newest view of the run.

Everything here runs in the service's own event loop; only `Board.post` is called from outside.
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
HEARTBEAT_SECONDS = 5.0  # a rank that has not answered for so long is not serving
_WATCH_SECONDS = 0.5  # between two answers of WatchStatus
_AGE_SECONDS = 1.0  # between two looks at a rank of which there is no news
_LOOK_SECONDS = 0.1  # between two looks at whether a checkpoint is whole
_ANSWERING = ("running", "waiting", "idle")
_Write = Callable[[Any], Awaitable[None]]


class Refused(Exception):
    """A call that ends with a status code and one sentence."""

    def __init__(self, code: grpc.StatusCode, sentence: str) -> None:
        super().__init__(sentence)
        self.code = code


class Board:
    """Where the newest view of the run hangs; anyone posts, and the loop's tasks await the next news.

    `turned` is set by the next news, and another event from then on: take it before you look, and miss nothing.
    """

    def __init__(self, view: RunView) -> None:
        self.view, self.closed = view, False
        self.loop = asyncio.new_event_loop()
        self.turned = asyncio.Event()

    @property
    def over(self) -> bool:
        return self.closed or self.view.state in OVER

    def post(self, view: RunView | None = None, *, closed: bool = False) -> None:
        """Never blocks; after the loop's end it only remembers."""
        self.view, self.closed = view or self.view, self.closed or closed
        with suppress(RuntimeError):  # the loop is closed
            self.loop.call_soon_threadsafe(self._turn)

    async def until(self, reached: Callable[[RunView], bool]) -> RunView:
        """The first view that is as expected. Raises Refused when the run ends before."""
        while True:
            turned = self.turned
            if reached(self.view):
                return self.view
            if self.over:
                raise Refused(
                    grpc.StatusCode.FAILED_PRECONDITION,
                    f"run {self.view.run} is over at step {self.view.step}: expected a live one",
                )
            await turned.wait()

    def _turn(self) -> None:
        self.turned.set()
        self.turned = asyncio.Event()


class Methods:
    """The methods of pentad.v1.Control, under their names in control.proto."""

    def __init__(self, board: Board, wishes: ControlRequests) -> None:
        self.board, self.wishes = board, wishes

    async def GetStatus(self, _request: Any, _write: _Write) -> Any:
        return status_of(self.board.view)

    async def WatchStatus(self, _request: Any, write: _Write) -> None:
        told = None
        while True:
            turned, over, view = self.board.turned, self.board.over, self.board.view
            if view != told:
                await write(status_of(view))
                told = view
            if over:
                return
            await asyncio.gather(turned.wait(), asyncio.sleep(_WATCH_SECONDS))

    async def Pause(self, request: Any, _write: _Write) -> Any:
        await self._admit(request)
        self.wishes.pause()
        return _outcome(await self.board.until(lambda view: view.state == "paused"))

    async def Resume(self, request: Any, _write: _Write) -> Any:
        await self._admit(request)
        self.wishes.resume()
        return _outcome(await self.board.until(lambda view: view.state != "paused"))

    async def Checkpoint(self, request: Any, _write: _Write) -> Any:
        view = await self._admit(request)
        # Looked at again and again instead of waited for: no thread is held, and a caller that leaves leaves nothing.
        while (saved := self.wishes.checkpoint(view.step, 0.0)) is None:
            await self.board.until(lambda _: not self.board.over)
            await asyncio.sleep(_LOOK_SECONDS)
        return _outcome(self.board.view, step=saved)

    async def Abort(self, request: Any, _write: _Write) -> Any:
        await self._admit(request)
        self.wishes.abort()
        view = await self.board.until(lambda _: self.board.over)
        return _outcome(view, state=view.state if view.state in OVER else "stopped")

    async def _admit(self, request: Any) -> RunView:
        """The present view. Raises Refused when the run is over, or in another generation than the caller believes."""
        view = await self.board.until(lambda _: not self.board.over)
        if request.generation not in (0, view.generation):
            sentence = f"generation is {request.generation}, but run {view.run} is in {view.generation}: expected that or 0 for any"
            raise Refused(grpc.StatusCode.FAILED_PRECONDITION, sentence)
        return view


class Health:
    """The methods of grpc.health.v1.Health.

    The servicer that grpc brings holds a service's lock while it writes to a watcher, so that one who does not read
    stops the news for all; here each call looks at the view by itself.
    """

    def __init__(self, board: Board) -> None:
        self.board = board

    async def Check(self, request: Any, _write: _Write) -> Any:
        found = self._look(request.service)
        if found == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN:
            raise Refused(
                grpc.StatusCode.NOT_FOUND, "service is unknown: expected '', pentad.v1.Control or pentad.rank.N"
            )
        return health_pb2.HealthCheckResponse(status=found)

    async def Watch(self, request: Any, write: _Write) -> None:
        told = None
        while True:
            turned, closed = self.board.turned, self.board.closed
            if (found := self._look(request.service)) != told:
                await write(health_pb2.HealthCheckResponse(status=found))
                told = found
            if closed:
                return
            with suppress(TimeoutError):  # without any news a heartbeat grows old
                await asyncio.wait_for(turned.wait(), _AGE_SECONDS)

    def _look(self, service: str) -> int:
        serving = healths(self.board.view, closed=self.board.closed, now=time.monotonic()).get(service)
        kinds = health_pb2.HealthCheckResponse
        return kinds.SERVICE_UNKNOWN if serving is None else kinds.SERVING if serving else kinds.NOT_SERVING


def healths(view: RunView, *, closed: bool, now: float) -> dict[str, bool]:
    """Name of a service -> whether it serves, at the monotonic second `now`."""
    live = not closed and view.state not in OVER
    whole = live and not (view.state == "recovering" and any(rank.state == "lost" for rank in view.ranks))
    ranks = {
        f"pentad.rank.{rank.rank}": live and rank.state in _ANSWERING and now - rank.heartbeat < HEARTBEAT_SECONDS
        for rank in view.ranks
    }
    return {"": whole, SERVICE: whole, **ranks}


def _outcome(view: RunView, **other: Any) -> Any:
    facts = {"run": view.run, "state": view.state, "step": view.step, "generation": view.generation}
    return MESSAGES["Outcome"](**{**facts, **other})
