"""Rank processes that are reused across tests."""

from __future__ import annotations

import io
import multiprocessing as mp
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from paths import SUPPORT

# What ranks import; numpy.ma, which Arrow imports when it first sees an array; and what torch does when it first sees a
# tensor subclass.
PRELOADED = [
    *("worker_processes", "pentad.workers.replication.transfer", "pentad.workers.runtime.runner"),
    *("numpy.ma", "torch.distributed.tensor"),
]
TIMEOUT = 90.0  # seconds for all answers to an order, on a shared machine


def process_context() -> Any:
    """How rank processes start: forked from a server that has already imported their modules, which is fast; spawned on
    machines with GPUs, as a process that has initialized CUDA must not be forked.
    """
    if Path("/dev/nvidiactl").exists():
        return mp.get_context("spawn")
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    path = [str(SUPPORT), *filter(None, [os.environ.get("PYTHONPATH")])]
    with patch.dict(os.environ, PYTHONPATH=os.pathsep.join(path)):  # preloading ignores modules that cannot be imported
        forkserver.ensure_running()
    return context


class _ByValue(pickle.Pickler):
    """Pickles tensors as bytes; torch's own pickler shares the memory of each through its own connection, which takes a
    hundred times as long for small ones."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is not torch.Tensor:
            return NotImplemented
        data = obj.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
        return _tensor_of, (data, obj.dtype, tuple(obj.shape))


def _tensor_of(data: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.from_numpy(data).view(dtype).view(shape)


def send(end: Connection, value: object) -> None:
    """Sends what `end.recv` at the other end returns, with tensors on the CPU."""
    file = io.BytesIO()
    _ByValue(file, pickle.HIGHEST_PROTOCOL).dump(value)
    end.send_bytes(file.getbuffer())


def answer_orders(end: Connection, run: Callable[[Any], object]) -> None:
    """Sends the result of each order, or its traceback, until the other end is closed."""
    while True:
        try:
            order = end.recv()
        except EOFError:
            return
        try:
            send(end, run(order))
        except BaseException:
            end.send(traceback.format_exc())


class Pool:
    """`size` processes of `serve(end, rank, size, device, folder)`, started by the first order.

    They are replaced after an unanswered order, so that a late answer is not mistaken for one to the next order.
    """

    def __init__(self, size: int, serve: Callable[..., None], device: str = "cpu") -> None:
        self.size, self.serve, self.device = size, serve, device
        self.ends: list[Connection] = []
        self.processes: list[Any] = []
        self.folder: tempfile.TemporaryDirectory[str] | None = None
        self.is_busy = False

    def send(self, orders: Sequence[object]) -> None:
        """Sends an order to each of the first ranks."""
        assert len(orders) <= self.size, f"{len(orders)} orders: expected at most {self.size}"
        if self.is_busy:
            self.stop()
        self.is_busy = True  # also after an interrupted start
        if not self.processes:
            self._start()
        self.deadline = time.monotonic() + TIMEOUT
        for end, order in zip(self.ends, orders, strict=False):
            end.send(order)

    def receive(self, rank: int) -> Any:
        """The next message of a rank."""
        end = self.ends[rank]
        assert end.poll(max(0.0, self.deadline - time.monotonic())), f"rank {rank}: no answer in {TIMEOUT:g} s"
        try:
            return end.recv()
        except EOFError:
            raise AssertionError(f"rank {rank} died") from None

    def answers(self, ranks: int, kind: type) -> list[Any]:
        """One message of this type from each of the first ranks.

        Fails with the traceback of the first rank to fail; others may be waiting for it.
        """
        found = dict[int, Any]()
        while missing := [rank for rank in range(ranks) if rank not in found]:
            ready = wait([self.ends[rank] for rank in missing], max(0.0, self.deadline - time.monotonic()))
            assert ready, f"ranks {missing}: no answer in {TIMEOUT:g} s"
            for rank in missing:
                if self.ends[rank] in ready:
                    found[rank] = self.receive(rank)
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
        context = process_context()
        self.folder = tempfile.TemporaryDirectory()
        for rank in range(self.size):
            end, remote_end = context.Pipe()
            args = (remote_end, rank, self.size, self.device, self.folder.name)
            process = context.Process(target=self.serve, args=args, daemon=True)
            process.start()
            remote_end.close()
            self.ends.append(end)
            self.processes.append(process)
