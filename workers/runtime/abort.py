"""Aborting a generation that has lost a rank: frees the train thread from waits that would never end."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from stat import S_ISSOCK
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the driver unpickles Aborted and does without torch
    import torch.distributed as dist


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
    is shut down for reading alone: gloo then closes it and wakes all who wait, whereas a send that fails meanwhile is
    never woken (seen with torch 2.13 in alltoallv).
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
