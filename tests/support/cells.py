"""Rank processes with a control thread each, as a worker actor has one: they can be fenced, killed and replaced."""

from __future__ import annotations

import faulthandler
import multiprocessing as mp
import os
import queue
import signal
import tempfile
import threading
import time
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import pytest
import torch
from fleet import named
from gpus import RANKS_A_GPU, gpu_of

from pentad.schedules.spec.plan import Plan
from pentad.workers.runtime.abort import Aborted

PATIENCE = 60.0 * RANKS_A_GPU  # seconds; a run's first step compiles kernels


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

    def answer(self, number: int, seconds: float = PATIENCE) -> Any:
        """Raises what the method raised."""
        while number not in self.answers:
            assert self.end.poll(seconds), f"no answer in {seconds} s"
            self.hear()
        value = self.answers.pop(number)
        if isinstance(value, Exception):
            raise value
        return value

    def hear(self) -> None:
        """Takes the next answer, to whichever call."""
        tag, value = self.end.recv()
        self.answers[tag] = value

    def wait_for(self, step: int) -> None:
        """Until this rank is in a step."""
        while self.answer(self.now("step")) < step:
            time.sleep(0.01)

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


def together(cells: list[Cell], method: str, *arguments: Any, seconds: float = PATIENCE) -> list[Any]:
    """What all answer; raises what the first to fail does, for whom others may be waiting."""
    asked = [(cell, cell.call(method, *arguments)) for cell in cells]
    deadline = time.monotonic() + seconds
    while late := [cell for cell, number in asked if number not in cell.answers]:
        ready = wait([cell.end for cell in late], max(0.0, deadline - time.monotonic()))
        assert ready, f"{method}: no answer of {list(map(cells.index, late))} in {seconds} s"
        for cell, number in asked:
            if cell.end in ready:
                cell.hear()
                if isinstance(cell.answers.get(number), Exception):
                    cell.answer(number)
    return [cell.answer(number) for cell, number in asked]


def join(cells: list[Cell], plan: Plan, generation: int) -> None:
    """Makes runners by rank (in generation 1 from nothing, later as heirs where there was one), and connects them."""
    made = [cell.call("make", plan, rank, generation) for rank, cell in enumerate(cells)]
    for cell, number in zip(cells, made, strict=True):
        cell.answer(number)
    address = cells[0].answer(cells[0].call("serve", "127.0.0.1", 30.0))
    together(cells, "connect", address, 30.0)


def outcome(cells: list[Cell], results: list, first: int) -> tuple[dict, dict]:
    """Losses by step and microbatch, and the state by name, of ranks that agree on both."""
    losses: dict[int, dict] = {}
    state: dict[str, torch.Tensor] = {}
    for mine in results:
        for result in mine:
            if result.step >= first:
                losses.setdefault(result.step, {}).update(result.losses)
    for found in together(cells, "state"):
        for name, value in found.items():
            assert torch.equal(state.setdefault(name, value), value), name
    return losses, state


def repair(cells: list[Cell], lost: list[int], plan: Plan, generation: int) -> tuple[int, dict]:
    """What the driver does: fences the living, takes stock, replaces the lost, hands the newest state on."""
    living = [rank for rank in range(len(cells)) if rank not in lost]
    for method in ("fence", "abort"):
        asked = {rank: cells[rank].now(method) for rank in living}
        for rank, number in asked.items():
            cells[rank].answer(number)
    asked = {rank: cells[rank].call("leave") for rank in living}
    stands = {rank: cells[rank].answer(number) for rank, number in asked.items()}
    version = max(stand.version for stand in stands.values())
    norm = next(stand.norm for stand in stands.values() if stand.version == version)
    for rank, stand in stands.items():
        if stand.version == version - 1 and stand.ready:
            cells[rank].answer(cells[rank].call("advance", norm))
    current = [r for r, s in stands.items() if s.version == version or s.ready]
    for rank in lost:
        cells[rank].stop()
        cells[rank] = Cell()
    join(cells, plan, generation)
    holders = {share: plan.holders(share) for share in plan.shares}
    sources = {s: next(r for r in held if r in current) for s, held in holders.items() if set(held) - set(current)}
    together(cells, "receive", sources, version)
    return version, stands


def lose_one(cells: list[Cell], plan: Plan, steps: int, how: int | None) -> None:
    """These steps once without a fault, and once with one of rank 1: a signal, or an error of its own (None). The plan
    takes the first cells; if it fails, they are replaced, who may be stuck."""
    ranks = cells[: plan.mesh.size]
    try:
        _lose_one(ranks, plan, steps, how)
    except BaseException:
        for cell in ranks:
            cell.stop()
        ranks[:] = [Cell() for _ in ranks]
        raise
    finally:
        cells[: plan.mesh.size] = ranks


def _lose_one(cells: list[Cell], plan: Plan, steps: int, how: int | None) -> None:
    join(cells, plan, 1)
    together(cells, "restore", None, 0)
    expected = outcome(cells, together(cells, "run", 0, steps), 0)
    together(cells, "close")

    join(cells, plan, 1)
    together(cells, "restore", None, 0)
    if how is None:
        cells[1].answer(cells[1].call("lose_touch", 4))
    part = steps // 4
    asked = [[cell.call("run", n * part, part, n < 3) for n in range(4)] for cell in cells]
    if how is None:
        with pytest.raises(RuntimeError, match="closed by peer"):
            cells[1].answer(asked[1][0])
        with pytest.raises(Aborted):  # it must not go on in the middle of what the others are at
            cells[1].answer(asked[1][1])
    else:
        cells[1].wait_for(3)
        cells[1].signal(how)
        time.sleep(0.3)
    version, stands = repair(cells, [1], plan, 2)
    assert 0 < version < steps, "the fault came too early or too late for this test"
    for rank in stands:
        with pytest.raises((Aborted, RuntimeError)):
            cells[rank].answer(asked[rank][-1])
    known = [list(stand.results) for stand in stands.values()]
    losses, state = outcome(cells, known + together(cells, "run", version, steps - version), 0)
    together(cells, "close")
    assert losses == expected[0]
    assert all(torch.equal(state[key], value) for key, value in expected[1].items())


def _serve(end: Any) -> None:
    torch.set_num_threads(1)
    from pentad.workers.runtime.runner import Runner

    orders: queue.Queue = queue.Queue()
    lock, runners = threading.Lock(), list[Runner]()
    board = Path(tempfile.mkdtemp(), "board")

    def reply(tag: int, value: Any) -> None:
        with lock:
            end.send((tag, value))

    def do(tag: int, method: str, *arguments: Any) -> None:
        try:
            if method == "make":
                plan, rank, generation = arguments
                heir_of = runners[0] if runners and generation > 1 else None
                runners[:] = [Runner(plan, rank, board, generation, gpu_of(rank), heir_of, blank=generation > 1)]
                reply(tag, None)
            elif method == "step":
                executor = runners[0].executor
                reply(tag, executor.step if executor else -1)
            elif method == "lose_touch":
                _lose_touch(runners[0], *arguments)
                reply(tag, None)
            elif method == "state":
                held = runners[0].parameters.values()
                kinds = [(each, kind, flat) for each in held for kind, flat in each.state().items()]
                state = {key: v for each, kind, flat in kinds for key, v in named(each, flat, f"{kind}.").items()}
                reply(tag, state | {name: bias.cpu() for each in held for name, bias in each.biases.named.items()})
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
                faulthandler.dump_traceback_later(30)
                do(tag, *order)
                faulthandler.cancel_dump_traceback_later()
            else:
                orders.put((tag, *order))

    threading.Thread(target=listen, daemon=True).start()
    while True:
        order = orders.get()
        if order[1] in ("leave", "serve", "connect", "receive"):
            faulthandler.dump_traceback_later(30)
        do(*order)
        faulthandler.cancel_dump_traceback_later()


def _lose_touch(runner: Any, step: int) -> None:
    """Has a rank fail in the NORM of a step, when its gradients are whole and the other ranks have heard the norm."""
    end = runner.executor.end
    real = end.reduce

    def cut() -> None:
        raise RuntimeError("Connection closed by peer")

    end.reduce = lambda number, check: real(number, cut if number == step else check)
