"""Copies in the memory of rank processes, as the driver has them made and reads them."""

from __future__ import annotations

import os
from typing import Any

from worker_processes import WorkerProcess, call_all

from pentad.orchestrator.cluster.copies import holders_of, newest_copy
from pentad.workers.replication.parts import CopyKey
from pentad.workers.replication.source import CopySource
from pentad.workers.replication.transfer import TOKEN_BYTES

TOKEN = os.urandom(TOKEN_BYTES)


class Copies:
    """Of a group of processes; rank r is on `nodes[r]`."""

    def __init__(self, ranks: list[WorkerProcess], nodes: str) -> None:
        self.ranks, self.holders = ranks, holders_of(nodes)
        self.addresses = call_all(ranks, "serve_copies", TOKEN)

    def replace(self, *lost: int) -> None:
        """Ranks that have been replaced by new processes serve, too."""
        for rank in lost:
            self.addresses[rank] = self.ranks[rank].answer(self.ranks[rank].call("serve_copies", TOKEN))

    def key(self, generation: int, step: int) -> CopyKey:
        return CopyKey(generation, step, len(self.ranks))

    def submit(self, generation: int, step: int) -> list[tuple[WorkerProcess, int]]:
        """The first phase, beside training; returns the calls to wait for."""
        asked = []
        for worker, holder in zip(self.ranks, self.holders, strict=True):
            worker.call("copy", step)
            address = self.addresses[holder]
            asked.append((worker, worker.call_beside("replicate", self.key(generation, step), address, TOKEN)))
        return asked

    def make(self, generation: int, step: int) -> list[Any]:
        """Both phases."""
        found = [worker.answer(number) for worker, number in self.submit(generation, step)]
        for worker in self.ranks:
            worker.answer(worker.call_now("commit", self.key(generation, step)))
        return found

    def newest(self, lost: set[int]) -> CopySource | None:
        living = [rank for rank in range(len(self.ranks)) if rank not in lost]
        held = {self.addresses[rank]: self.ranks[rank].answer(self.ranks[rank].call_now("held")) for rank in living}
        return newest_copy(held, TOKEN)
