"""Freeing a rank from a generation that has lost a member: what its train thread waits for will never come."""

from __future__ import annotations

import math
import socket
import time
from contextlib import suppress
from os import dup
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the driver reads Fenced out of its workers' answers, and does without torch
    import torch.distributed as dist

    from pentad.workers.runtime.executor import Executor
    from pentad.workers.runtime.streams import CudaStreams
    from pentad.workers.transport.stream_flags import StreamFlags

STILL_SECONDS = 0.3
RUN_OUT_SECONDS = 4.0  # the driver waits regroup.FENCE_SECONDS


class Aborted(Exception):
    """The generation of this call is over; nothing that it began counts."""


def listening() -> frozenset[int]:
    """TCP ports that this process listens on."""
    import psutil  # needed on CPUs alone

    return frozenset(c.laddr.port for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN)


class SocketRegistry:
    """The TCP connections of one generation (gloo's and the store's), which another thread can cut.

    gloo knows no abort: a wait for a lost rank, or for a living one that itself waits, ends when the connection does.
    """

    def __init__(self, store_port: int) -> None:
        self.before, self.known = listening(), {store_port}

    def exchange(self, store: dist.TCPStore, rank: int, size: int) -> None:
        """Tells the others which ports this rank's connections come in at, and learns theirs."""
        store.set(f"wires/{rank}", ",".join(map(str, listening() - self.before)))
        for other in range(size):
            self.known |= set(map(int, filter(None, store.get(f"wires/{other}").decode().split(","))))

    def cut(self) -> int:
        """Shuts every connection of the generation down; returns how many."""
        import psutil

        ports, count = self.known | (listening() - self.before), 0
        for wire in psutil.Process().net_connections("tcp"):
            ends = {wire.laddr.port} | ({wire.raddr.port} if wire.raddr else set())
            if wire.status == psutil.CONN_LISTEN or wire.fd < 0 or not ends & ports:
                continue
            with suppress(OSError), socket.socket(fileno=dup(wire.fd)) as end:  # it may be closed by now
                end.shutdown(socket.SHUT_RDWR)
                count += 1
        return count


def run_out(executor: Executor, signals: StreamFlags | None, lanes: CudaStreams, longest: float) -> None:
    """Lets a GPU run out: no step counts any more, and no transfer waits; returns when nothing moves, for longer than
    the `longest` instruction takes (transfers inside one are not to be cut short), or when time is up.

    Only memory is written: calls of the GPU's driver may be held up.
    """
    still = max(STILL_SECONDS, 1.5 * longest)
    executor.end.fence.fill_(math.nan)
    if signals is not None:
        signals.release()
    moved, done = time.monotonic(), -1
    until = moved + RUN_OUT_SECONDS
    while time.monotonic() < min(moved + still, until):
        if (now := lanes.done()) != done:
            moved, done = time.monotonic(), now
        time.sleep(0.01)
