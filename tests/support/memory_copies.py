"""Copies in the memory of rank processes, made and read as by the driver."""

from __future__ import annotations

import os
import signal
from typing import Any

import torch
from worker_processes import WorkerProcess, call_all, losses_and_state, start_generation, start_run, uninterrupted

from pentad.orchestrator.cluster.copies import holders_of, newest_copy
from pentad.schedules.spec.plan import Plan
from pentad.workers.replication.parts import CopyKey
from pentad.workers.replication.source import CopySource
from pentad.workers.replication.transfer import TOKEN_BYTES

TOKEN = os.urandom(TOKEN_BYTES)


class Copies:
    """The copies of a group of processes; rank r is on `nodes[r]`."""

    def __init__(self, ranks: list[WorkerProcess], nodes: str) -> None:
        self.ranks, self.holders = ranks, holders_of(nodes, nodes)
        self.addresses = call_all(ranks, "serve_copies", TOKEN)

    def replace(self, *lost: int) -> None:
        """Lets ranks that were replaced by new processes serve copies, too."""
        for rank in lost:
            self.addresses[rank] = self.ranks[rank].answer(self.ranks[rank].call("serve_copies", TOKEN))

    def key(self, generation: int, step: int) -> CopyKey:
        return CopyKey(generation, step, len(self.ranks))

    def submit(self, generation: int, step: int) -> list[tuple[WorkerProcess, int]]:
        """Starts the first phase beside training; returns the calls to wait for."""
        asked = []
        for worker, holder in zip(self.ranks, self.holders, strict=True):
            worker.call("copy", step)
            address = self.addresses[holder]
            asked.append((worker, worker.call_beside("replicate", self.key(generation, step), address, TOKEN)))
        return asked

    def make(self, generation: int, step: int) -> list[Any]:
        """Runs both phases."""
        found = [worker.answer(number) for worker, number in self.submit(generation, step)]
        for worker in self.ranks:
            worker.answer(worker.call_now("commit", self.key(generation, step)))
        return found

    def newest(self, lost: set[int]) -> CopySource | None:
        living = [rank for rank in range(len(self.ranks)) if rank not in lost]
        held = {self.addresses[rank]: self.ranks[rank].answer(self.ranks[rank].call_now("held")) for rank in living}
        return newest_copy(held, TOKEN)


def lose(ranks: list[WorkerProcess], *lost: int) -> None:
    """Kills ranks, ends the generation on the others, and starts new processes."""
    for rank in lost:
        ranks[rank].signal(signal.SIGKILL)
    living = [worker for rank, worker in enumerate(ranks) if rank not in lost]
    for method in ("fence", "abort"):
        for worker, number in [(worker, worker.call_now(method)) for worker in living]:
            worker.answer(number)
    for worker, number in [(worker, worker.call("leave")) for worker in living]:
        worker.answer(number)


def replaced(ranks: list[WorkerProcess], plan: Plan, copies: Copies, generation: int, *lost: int) -> int:
    """Replaces lost ranks and restores the newest copy that the others hold; returns its step."""
    source = copies.newest(set(lost))
    assert source is not None, "no copy is complete"
    for rank in lost:
        ranks[rank].stop()
        ranks[rank] = WorkerProcess()
    copies.replace(*lost)
    start_generation(ranks, plan, generation, source)
    call_all(ranks, "restore_copy", source)
    return source.key.step


def assert_ends_the_same(ranks: list[WorkerProcess], expected: tuple[dict, dict], first: int, steps: int) -> None:
    losses, state = losses_and_state(ranks, call_all(ranks, "run", first, steps - first), first)
    call_all(ranks, "close")
    assert losses == {step: its for step, its in expected[0].items() if step >= first}
    assert state.keys() == expected[1].keys()
    assert all(torch.equal(state[name], value) for name, value in expected[1].items())


def assert_recovers_from_a_copy(
    ranks: list[WorkerProcess], plan: Plan, nodes: str, copied: int, steps: int, *lost: int
) -> None:
    """Makes a copy of `copied` steps while three more run, of which the last is open when ranks are lost; the run must
    end with the bits of one without a fault."""
    expected = uninterrupted(ranks, plan, steps)
    start_run(ranks, plan)
    copies = Copies(ranks, nodes)
    asked = [worker.call("run", 0, copied, True) for worker in ranks]
    sent = copies.submit(1, copied)
    asked += [worker.call("run", copied, 3, True) for worker in ranks]
    for worker, number in sent:
        assert worker.answer(number).bytes > 0
    for worker in ranks:
        worker.answer(worker.call_now("commit", copies.key(1, copied)))
    for worker, number in zip(ranks * 2, asked, strict=True):
        worker.answer(number)
    lose(ranks, *lost)
    assert replaced(ranks, plan, copies, 2, *lost) == copied
    assert_ends_the_same(ranks, expected, copied, steps)
