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
    """The generation of this call is over; nothing that it began counts."""


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
        """Guards publishing to others, from any thread: raises Aborted if the generation is over, and delays its end
        until the block is done."""
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
    """Runs a rank's calls one by one, and is left behind if it is in a wait that the end of its generation does not
    end.

    When gloo closes a connection, it wakes those who wait for operations that have not begun. It forgets an operation
    that is partly written or read, or whose write failed because the peer had closed first: who waits for that one
    wakes up at the timeout of the group, and nothing interrupts it (torch 2.13). With long messages, one is nearly
    always in progress.
    """

    def __init__(self, fence: Fence) -> None:
        self.fence, self.calls = fence, queue.SimpleQueue[tuple[Callable[[], Any], futures.Future[Any]] | None]()
        self.is_running = self.is_waiting = self.is_abandoned = False
        self.changing = threading.Lock()

    def run(self, function: Callable[[], T]) -> T:
        """The function's result. Raises Aborted if it still waits PATIENCE_SECONDS after the generation has ended."""
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
        """A wait for other ranks. If the thread was left behind, it raises Aborted at the end of the wait, as others
        use its state by then."""
        self.is_waiting = True
        try:
            yield
        finally:
            with self.changing:
                self.is_waiting = False
                if self.is_abandoned:
                    raise Aborted

    def close(self) -> None:
        """Ends the thread as soon as it is idle."""
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
            del call  # and everything it refers to


def abandonable(method: Method) -> Method:
    """Runs a method that waits for other ranks on its object's `thread`, an AbandonableThread, if it has one."""

    @wraps(method)
    def call(self: Any, *arguments: Any, **options: Any) -> Any:
        function = partial(method, self, *arguments, **options)
        return self.thread.run(function) if self.thread is not None else function()

    return call  # type: ignore[return-value]


def tcp_sockets() -> Iterator[socket.socket]:
    """Duplicates of this process's TCP sockets, each open until the next one is asked for."""
    for name in os.listdir("/dev/fd"):
        with suppress(OSError):  # it may have been closed by now
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

    gloo cannot abort: a wait for a lost rank, or for a rank that is itself waiting, ends only when the connection does.
    Connections are shut down only for reading, lest writes fail: gloo then closes them and wakes most of those who wait
    (see `AbandonableThread`).
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
