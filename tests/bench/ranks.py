"""Processes for the ranks of a benchmark on one host, without Ray."""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing as mp
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Any

import torch
from gpus import gpu_of

from pentad.schedules.ir.errors import PentadError
from pentad.schedules.spec.plan import Plan
from pentad.workers.runtime.runner import Runner

Work = Callable[[Connection, Plan, int], Any]


@dataclass(frozen=True)
class Failure:
    """A rank's reply if it failed."""

    text: str


class Ranks:
    """Rank processes that are reused from run to run; more are started when a mesh needs them.

    Each calls `work(connection, plan, rank)`; `limit` is the time to wait for an answer, in seconds.
    """

    def __init__(self, limit: float, work: Work) -> None:
        self.limit, self.work = limit, work
        self.connections: list[Connection] = []
        self.processes: list[Any] = []

    def run(self, plan: Plan) -> list[Any]:
        """The results of `work` on every rank. Raises PentadError if one fails; the next run starts new processes."""
        context = mp.get_context("spawn")
        while len(self.connections) < plan.mesh.size:
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, self.work), daemon=True)
            process.start()
            self.connections.append(ours)
            self.processes.append(process)
        connections = self.connections[: plan.mesh.size]
        for rank, connection in enumerate(connections):
            connection.send((plan, rank))
        answers = [self._receive(connections[0])]  # the address at which the ranks meet
        if not isinstance(answers[0], Failure):
            for connection in connections:
                connection.send(answers[0])
            answers = [self._receive(connection) for connection in connections]
        for rank, answer in enumerate(answers):
            if isinstance(answer, Failure):
                self.stop()
                raise PentadError(f"rank {rank}: {answer.text}")
        return answers

    def stop(self) -> None:
        for connection, process in zip(self.connections, self.processes, strict=True):
            connection.close()
            process.join(5)
            process.kill()
        self.connections, self.processes = [], []

    def _receive(self, connection: Connection) -> Any:
        try:
            return connection.recv() if connection.poll(self.limit) else Failure(f"no answer in {self.limit:g} s")
        except EOFError:
            return Failure("the process died")


def _serve(connection: Connection, work: Work) -> None:
    while True:
        try:
            answer = work(connection, *connection.recv())
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            connection.send(answer)
        except EOFError:
            return
        except BaseException:
            connection.send(Failure(traceback.format_exc()))


@contextmanager
def connected(connection: Connection, plan: Plan, rank: int) -> Iterator[Runner]:
    """The Runner of a rank, connected to the other ranks, with the initial weights."""
    gpu = gpu_of(rank)
    if plan.device == "cuda":
        torch.cuda.set_device(gpu)
        torch.cuda.reset_peak_memory_stats()
    with tempfile.TemporaryDirectory() as folder:
        runner = Runner(plan, rank, Path(folder, "progress"), gpu=gpu)
        if rank == 0:
            connection.send(runner.serve("127.0.0.1", 60))
        runner.connect(connection.recv(), 60)
        runner.restore(None)
        if plan.mesh.size > 1:
            torch.distributed.barrier()  # a rank's first step reads the initial weights of its peers
        yield runner
        runner.close()


def spawn(worker: Callable[..., None], args: argparse.Namespace, count: int) -> list[dict[str, Any]]:
    """Runs `worker(args, rank, store, results)` in `count` processes. `store` is the path of a FileStore.

    Prints and returns what they put into the queue `results`; exits with status 1 if one of them fails.
    """
    context = mp.get_context("spawn")
    results: SimpleQueue = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder, "store"))
        processes = [context.Process(target=worker, args=(args, rank, store, results)) for rank in range(count)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
    rows = []
    while not results.empty():
        rows.append(results.get())
        print(json.dumps(rows[-1]), flush=True)
    if any(process.exitcode for process in processes):
        raise SystemExit(1)
    return rows
