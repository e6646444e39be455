"""Copies one rank's part of the state to host memory and to its holder, beside training."""

from __future__ import annotations

import time
from typing import NamedTuple

import torch

from pentad.schedules.ir.errors import PentadError
from pentad.workers.checkpoint.snapshot import Files, Snapshots, layout, snapshot_bytes
from pentad.workers.host_memory import HostMemory
from pentad.workers.replication.parts import CopyKey, CopyPart, HostCopies
from pentad.workers.replication.transfer import Check, send_part

MEMORIES = 2  # for a rank's own part: of the copy that counts, and of the one being made


class SentPart(NamedTuple):
    """A part that is now in its rank's and its holder's memory: its size in bytes, and the seconds that the copy to
    host memory and the transfer took, beside training."""

    bytes: int
    snapshot_seconds: float
    transfer_seconds: float


class Replicator:
    """Replicates the state of one rank and generation, after `reserve`. `request` is for the train thread, `send` for
    another thread."""

    def __init__(self, copies: HostCopies, rank: int, device: torch.device) -> None:
        self.copies, self.rank, self.snapshots = copies, rank, Snapshots(device, lane="copies")

    def reserve(self, files: Files) -> None:
        """Allocates memory for both copies, which takes seconds for many GB."""
        if self.copies.own_bytes != (size := snapshot_bytes(files)):
            self.copies.own_spare.clear()
            self.copies.own_spare += [
                HostMemory(size, self.snapshots.device, "elastic.replicate_every needs") for _ in range(MEMORIES)
            ]
            self.copies.own_bytes = size

    def request(self, step: int, files: Files, version: torch.Tensor) -> None:
        """Has the state after `step` steps, of which `files` are views, copied to host memory. `send` must follow; it
        raises any error made here, too."""
        with self.snapshots.failing():
            self.reserve(files)
            if self.snapshots.memory is None:
                self.snapshots.memory = self._free_memory(snapshot_bytes(files))
            self.snapshots.request(step, files, version)

    def send(self, key: CopyKey, address: str, token: bytes, check: Check) -> SentPart:
        """Waits for the snapshot; returns once the part is in this process and in the one at `address`.

        Raises PentadError if the holder does not accept it, and what `check` raises.
        """
        files, snapshot_seconds = self.snapshots.take(key.step, check)
        index, memory = layout(files), self.snapshots.detach()
        data = memory.buffer.numpy()
        self.copies.put(key, self.rank, CopyPart(index, data, memory, self.copies.own_spare.append))
        began = time.monotonic()
        try:
            send_part(address, token, key, self.rank, index, data, check)
        except OSError as error:
            raise PentadError(f"rank {self.rank}'s copy of step {key.step} was not stored ({error})") from error
        return SentPart(data.nbytes, snapshot_seconds, time.monotonic() - began)

    def _free_memory(self, size: int) -> HostMemory:
        spare = self.copies.own_spare
        self.copies.discard(self.rank)  # a part that was not sent
        while spare:
            if (memory := spare.pop()).buffer.numel() == size:
                return memory
        # A generation that ended early has kept one.
        return HostMemory(size, self.snapshots.device, "elastic.replicate_every needs")
