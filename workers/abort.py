"""Aborting a generation that has lost a rank: frees the train thread from waits that would never end."""

from __future__ import annotations

import os
import queue
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager, nullcontext, suppress
from functools import partial, wraps
from stat import S_ISSOCK
from typing import TYPE_CHECKING, Any, TypeVar

from pentad.workers.background import answer
from pentad.workers.rank_waits import rank_waits

if TYPE_CHECKING:  # the driver unpickles Aborted and does without torch
    import torch.distributed as dist

T = TypeVar("T")
Method = TypeVar("Method", bound=Callable[..., Any])
POLL_SECONDS, PATIENCE_SECONDS = 0.1, 1.0


class Aborted(Exception):
    """The generation of this call is over; nothing it began counts."""


class Fence:
    """The end of a generation: `set` by the control thread, or by an error of the train thread, which checks it."""

    def __init__(self) -> None:
        self.is_set = self.failed = False
        self._publishing = threading.Lock()

    def set(self) -> None:
        with self._publishing:
            self.is_set = True

    def check(self) -> None:
        """Raises Aborted if the generation is over."""
        if self.is_set or self.failed:
            raise Aborted

    @contextmanager
    def publishing(self) -> Iterator[None]:
        """What others will see, from any thread: raises Aborted if the generation is over, and it ends only
        afterwards."""
        with self._publishing:
            self.check()
            yield

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Reports errors raised after an abort as Aborted. Any other error ends the generation: a queued call would
        otherwise start in the middle of a step, and add to gradients that lack only their norm."""
        self.check()
        try:
            yield
            self.check()
        except Exception as error:
            if self.is_set or self.failed:
                raise Aborted(str(error)) from None
            self.failed = True
            raise


class AbandonableThread:
    """Runs calls of a rank one by one, and is left behind in a wait that the end of its generation does not end.

    gloo, when it closes a connection, wakes those who wait for operations that have not begun. One that is partly
    written or read, or whose write failed because the peer had closed first, it forgets: who waits for that wakes up at
    the timeout of the group, and nothing interrupts it (torch 2.13). Of long messages one is nearly always under way.
    """

    def __init__(self, fence: Fence) -> None:
        self.fence, self.calls = fence, queue.SimpleQueue[tuple[Callable[[], Any], futures.Future[Any]] | None]()
        self.is_running = self.is_waiting = self.is_abandoned = False
        self.changing = threading.Lock()

    def run(self, function: Callable[[], T]) -> T:
        """The result of a function. Raises Aborted if it waits PATIENCE_SECONDS after the generation has ended."""
        self.fence.check()
        rank_waits.abandonable = self.waiting
        if not self.is_running:
            self.is_running = True
            threading.Thread(target=self._serve, name="pentad-train", daemon=True).start()
        result, patience = futures.Future[T](), PATIENCE_SECONDS
        self.calls.put((function, result))
        while not futures.wait((result,), POLL_SECONDS).done:
            patience -= POLL_SECONDS if self.fence.is_set else 0.0
            if patience <= 0 and self._abandon():
                raise Aborted("left behind in a wait for another rank")
        try:
            return result.result()
        finally:
            del result  # the traceback of its error refers to this frame

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """A wait for other ranks. A thread that was left behind raises Aborted at its end: others use its state now."""
        self.is_waiting = True
        try:
            yield
        finally:
            with self.changing:
                self.is_waiting = False
                if self.is_abandoned:
                    raise Aborted

    def close(self) -> None:
        """Ends the thread, as soon as it is idle."""
        if self.is_running:
            self.is_running, rank_waits.abandonable = False, nullcontext
            self.calls.put(None)

    def _abandon(self) -> bool:
        with self.changing:
            self.is_abandoned = self.is_waiting
            return self.is_abandoned

    def _serve(self) -> None:
        while (call := self.calls.get()) is not None:
            answer(*call)
            del call  # and what it refers to


def abandonable(method: Method) -> Method:
    """A method that waits for other ranks runs on the `thread` of its object, an AbandonableThread, if it has one."""

    @wraps(method)
    def call(self: Any, *arguments: Any, **options: Any) -> Any:
        function = partial(method, self, *arguments, **options)
        return self.thread.run(function) if self.thread is not None else function()

    return call  # type: ignore[return-value]


def tcp_sockets() -> Iterator[socket.socket]:
    """Duplicates of this process's TCP sockets, each open until the next one is asked for."""
    for name in os.listdir("/dev/fd"):
        with suppress(OSError):  # it may be closed by now
            if S_ISSOCK(os.fstat(int(name)).st_mode):
                with socket.socket(fileno=os.dup(int(name))) as end:
                    if end.family in (socket.AF_INET, socket.AF_INET6) and end.type == socket.SOCK_STREAM:
                        yield end


def is_listening(end: socket.socket) -> bool:
    return bool(end.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def listening_ports() -> frozenset[int]:
    """TCP ports that this process listens on."""
    return frozenset(end.getsockname()[1] for end in tcp_sockets() if is_listening(end))


class SocketRegistry:
    """The TCP connections of one generation (gloo's and the store's), which another thread can shut down.

    gloo cannot abort: a wait for a lost rank, or for a rank that itself waits, ends only when the connection does. It
    is shut down for reading alone, lest writes fail: gloo then closes it and wakes most of those who wait, see
    `AbandonableThread`.
    """

    def __init__(self, store_port: int) -> None:
        self.ports_before, self.known_ports = listening_ports(), {store_port}

    def exchange(self, store: dist.TCPStore, rank: int, size: int) -> None:
        """Tells the other ranks the ports this rank listens on, and learns theirs."""
        store.set(f"ports/{rank}", ",".join(map(str, listening_ports() - self.ports_before)))
        for other in range(size):
            self.known_ports |= set(map(int, filter(None, store.get(f"ports/{other}").decode().split(","))))

    def shutdown(self) -> int:
        """Shuts down every connection of the generation; returns how many."""
        ports, count = self.known_ports | (listening_ports() - self.ports_before), 0
        for end in tcp_sockets():
            with suppress(OSError):  # it has no peer
                if not is_listening(end) and {end.getsockname()[1], end.getpeername()[1]} & ports:
                    end.shutdown(socket.SHUT_RD)
                    count += 1
        return count
