"""Rank processes that outlive a test: importing torch once is the cost of a rank."""

from __future__ import annotations

import multiprocessing as mp
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

PATIENCE = 90.0  # seconds for all answers to an order, on a machine that others use too


class Pool:
    """`size` processes of `serve(end, rank, size, device, folder)`, made when the first order is given.

    After an order that was not answered they are made anew: a late answer must not be taken for that to the next order.
    """

    def __init__(self, size: int, serve: Callable[..., None], device: str = "cpu") -> None:
        self.size, self.serve, self.device = size, serve, device
        self.ends: list[Connection] = []
        self.processes: list[Any] = []
        self.folder: tempfile.TemporaryDirectory[str] | None = None
        self.is_busy = False

    def order(self, orders: Sequence[object]) -> None:
        """One for each of the first ranks."""
        assert len(orders) <= self.size, f"{len(orders)} ranks expected of {self.size}"
        if self.is_busy:
            self.stop()
        if not self.processes:
            self._start()
        self.is_busy, self.deadline = True, time.monotonic() + PATIENCE
        for end, each in zip(self.ends, orders, strict=False):
            end.send(each)

    def heard(self, rank: int) -> Any:
        """What a rank says; raises where it says nothing."""
        end = self.ends[rank]
        assert end.poll(max(0.0, self.deadline - time.monotonic())), f"rank {rank}: no answer in {PATIENCE:g} s"
        try:
            return end.recv()
        except EOFError:
            raise AssertionError(f"rank {rank} died") from None

    def answers(self, ranks: int, kind: type) -> list[Any]:
        """Of the first ranks; raises with the traceback of the first to fail, for whom others may be waiting."""
        found = dict[int, Any]()
        while late := [rank for rank in range(ranks) if rank not in found]:
            ready = wait([self.ends[rank] for rank in late], max(0.0, self.deadline - time.monotonic()))
            assert ready, f"ranks {late}: no answer in {PATIENCE:g} s"
            for rank in late:
                if self.ends[rank] in ready:
                    found[rank] = self.heard(rank)
                    assert isinstance(found[rank], kind), f"rank {rank}: {found[rank]}"
        self.is_busy = False
        return [found[rank] for rank in range(ranks)]

    def stop(self) -> None:
        for end in self.ends:
            end.close()
        for process in self.processes:
            process.join(0 if self.is_busy else 10)
            process.kill()
            process.join()
        if self.folder is not None:
            self.folder.cleanup()
        self.ends, self.processes, self.folder, self.is_busy = [], [], None, False

    def _start(self) -> None:
        context = mp.get_context("spawn")
        self.folder = tempfile.TemporaryDirectory()
        for rank in range(self.size):
            here, there = context.Pipe()
            args = (there, rank, self.size, self.device, self.folder.name)
            process = context.Process(target=self.serve, args=args, daemon=True)
            process.start()
            there.close()
            self.ends.append(here)
            self.processes.append(process)
