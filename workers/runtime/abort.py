"""Aborting a generation that has lost a rank: frees the train thread from waits that nothing will ever end."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from os import dup
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the driver unpickles Aborted and does without torch
    import torch.distributed as dist

    from pentad.workers.runtime.optimizer_step import OptimizerStep
    from pentad.workers.runtime.streams import CudaStreams
    from pentad.workers.transport.p2p import P2PTransport
    from pentad.workers.transport.p2p_ipc import IpcTransport

QUIET_SECONDS = 0.3
DRAIN_SECONDS = 4.0  # the driver waits regroup.FENCE_SECONDS


class Aborted(Exception):
    """The generation of this call is over; nothing it began counts."""


class Fence:
    """The end of a generation: `set` by the control thread, or by an error of the train thread, which checks it."""

    def __init__(self) -> None:
        self.is_set = self.failed = False

    def set(self) -> None:
        self.is_set = True

    def check(self) -> None:
        """Raises Aborted if the generation is over."""
        if self.is_set or self.failed:
            raise Aborted

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Errors raised after an abort are reported as Aborted, and any other error ends the generation: a queued call
        would otherwise continue in the middle of a step and add to gradients that are only waiting for their norm."""
        self.check()
        try:
            yield
            self.check()
        except Exception as error:
            if self.is_set or self.failed:
                raise Aborted(str(error)) from None
            self.failed = True
            raise


def listening_ports() -> frozenset[int]:
    """TCP ports that this process listens on."""
    import psutil  # needed on CPUs only

    return frozenset(c.laddr.port for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN)


class SocketRegistry:
    """The TCP connections of one generation (gloo's and the store's), which another thread can shut down.

    gloo cannot abort: a wait for a lost rank, or for a rank that itself waits, ends only when the connection does.
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
        import psutil

        ports, count = self.known_ports | (listening_ports() - self.ports_before), 0
        for connection in psutil.Process().net_connections("tcp"):
            ends = {connection.laddr.port} | ({connection.raddr.port} if connection.raddr else set())
            if connection.status == psutil.CONN_LISTEN or connection.fd < 0 or not ends & ports:
                continue
            with suppress(OSError), socket.socket(fileno=dup(connection.fd)) as end:  # it may be closed by now
                end.shutdown(socket.SHUT_RDWR)
                count += 1
        return count


def drain(
    lanes: CudaStreams,
    optimizer_step: OptimizerStep,
    transport: P2PTransport | IpcTransport,
    longest_instruction: float,
) -> None:
    """Lets a GPU finish what it was given, without further steps or waits for transfers.

    Returns when no instruction has ended for longer than the longest one takes (transfers inside an instruction must
    not be cut short), or after DRAIN_SECONDS. Only writes memory: calls of the CUDA driver may be blocked.
    """
    quiet = max(QUIET_SECONDS, 1.5 * longest_instruction)
    optimizer_step.cancel()
    transport.release()
    last_change, completed = time.monotonic(), -1
    deadline = last_change + DRAIN_SECONDS
    while time.monotonic() < min(last_change + quiet, deadline):
        if (now := lanes.progress.completed()) != completed:
            last_change, completed = time.monotonic(), now
        time.sleep(0.01)
