"""Rank processes with a control thread each, as a worker actor has one: they can be fenced, killed and replaced."""

from __future__ import annotations

import multiprocessing as mp
import os
import queue
import signal
import tempfile
import threading
from pathlib import Path
from typing import Any

import torch
from fleet import free_port

from pentad.schedules.plan import Plan


class Cell:
    """One process. `call` queues a method of its Runner behind the others, `now` calls it beside them."""

    def __init__(self) -> None:
        context = mp.get_context("spawn")
        self.end, there = context.Pipe()
        self.process = context.Process(target=_serve, args=(there,), daemon=True)
        self.process.start()
        there.close()
        self.asked, self.answers = 0, dict[int, Any]()

    def call(self, method: str, *arguments: Any) -> int:
        return self._ask("call", method, *arguments)

    def now(self, method: str, *arguments: Any) -> int:
        return self._ask("now", method, *arguments)

    def answer(self, number: int, seconds: float = 30.0) -> Any:
        """Raises what the method raised."""
        while number not in self.answers:
            assert self.end.poll(seconds), f"no answer in {seconds} s"
            tag, value = self.end.recv()
            self.answers[tag] = value
        value = self.answers.pop(number)
        if isinstance(value, Exception):
            raise value
        return value

    def signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def stop(self) -> None:
        self.signal(signal.SIGKILL) if self.process.is_alive() else None
        self.process.join(10)
        self.end.close()

    def _ask(self, *order: Any) -> int:
        self.asked += 1
        self.end.send((self.asked, *order))
        return self.asked


def together(cells: list[Cell], method: str, *arguments: Any, seconds: float = 30.0) -> list[Any]:
    asked = [cell.call(method, *arguments) for cell in cells]
    return [cell.answer(number, seconds) for cell, number in zip(cells, asked, strict=True)]


def join(cells: list[Cell], plan: Plan, epoch: int) -> None:
    """Makes runners by rank (in epoch 1 from nothing, later as heirs where there was one), and connects them."""
    address = f"127.0.0.1:{free_port()}"
    made = [cell.call("make", plan, rank, epoch) for rank, cell in enumerate(cells)]
    for cell, number in zip(cells, made, strict=True):
        cell.answer(number)
    together(cells, "connect", address, 30.0)


def _serve(end: Any) -> None:
    torch.set_num_threads(1)
    from pentad.workers.runner import Runner

    orders: queue.Queue = queue.Queue()
    lock, runners = threading.Lock(), list[Runner]()
    board = Path(tempfile.mkdtemp(), "board")

    def reply(tag: int, value: Any) -> None:
        with lock:
            end.send((tag, value))

    def do(tag: int, method: str, *arguments: Any) -> None:
        try:
            if method == "make":
                plan, rank, epoch = arguments
                runners[:] = [Runner(plan, rank, board, epoch, rank, runners[0] if runners and epoch > 1 else None)]
                reply(tag, None)
            elif method == "state":
                held = runners[0].parameters.values()
                reply(tag, {name: value.cpu().clone() for each in held for name, value in each.state().items()})
            else:
                reply(tag, getattr(runners[0], method)(*arguments))
        except Exception as error:
            reply(tag, type(error)(str(error)))

    def listen() -> None:
        while True:
            try:
                tag, how, *order = end.recv()
            except (EOFError, OSError):
                os._exit(0)
            if how == "now":
                do(tag, *order)
            else:
                orders.put((tag, *order))

    threading.Thread(target=listen, daemon=True).start()
    while True:
        do(*orders.get())
