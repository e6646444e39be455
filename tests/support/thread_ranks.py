"""Tensor ranks that are threads of this process and read each other's slots."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any

import torch
from host_copies import EagerLane
from simulated_gpus import SimulatedMemory

from pentad.schedules.spec.mesh import Axis
from pentad.workers.parallel.tensor_parallel import TensorParallelGroup
from pentad.workers.transport.peer_rows import READ, PeerRows
from pentad.workers.transport.stream_flags import FlagWait, FlagWrite

SLOTS = 3
AXIS: Axis = "tp"


def flags_of(ranks: range, count: int = SLOTS) -> dict[Hashable, int]:
    return {(AXIS, slot, a, b): READ for slot in range(count) for a in ranks for b in ranks}


class ThreadFlags:
    def __init__(self, values: dict[Hashable, int]) -> None:
        self.values, self.changed = values, threading.Condition()

    def batch(self, steps: Sequence[FlagWrite | FlagWait]) -> Sequence[FlagWrite | FlagWait]:
        return steps

    def run(self, batch: Sequence[FlagWrite | FlagWait], stream: None = None) -> None:
        for step in batch:
            with self.changed:
                if isinstance(step, FlagWrite):
                    self.values[step.flag] = step.value
                    self.changed.notify_all()
                else:
                    assert self.changed.wait_for(partial(self._has, *step), 20)

    def _has(self, flag: Hashable, bit: int) -> bool:
        return self.values[flag] & bit != 0


def on_ranks(count: int, elements: int, work: Callable[[TensorParallelGroup], Any]) -> list[Any]:
    """What `work` returns on each of `count` ranks, which are threads."""
    slots = {rank: torch.full((SLOTS, elements), torch.nan, dtype=torch.float64) for rank in range(count)}
    memory = SimulatedMemory({rank: {AXIS: each.view(-1)} for rank, each in slots.items()})
    flags = ThreadFlags(flags_of(range(count)))
    found: dict[int, Any] = {}

    def run(rank: int) -> None:
        rows = PeerRows(AXIS, range(count), rank, flags, memory, slots[rank].view(torch.uint8), EagerLane())
        group: Any = object()
        found[rank] = work(TensorParallelGroup(group, count, rank, rows))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return [found[rank] for rank in range(count)]
