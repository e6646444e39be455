"""OFFLOAD and RELOAD: keeps activations in host memory while others need the device's.

Storages are moved, not tensors: a storage is emptied, and later filled again under the tensors that view it, some of
which only an autograd graph refers to.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from contextlib import nullcontext
from itertools import chain
from typing import NamedTuple

import torch

from pentad.schedules.ir.instruction import Key, Op
from pentad.schedules.passes.offload_cut import cut
from pentad.workers.runtime.streams import CudaStreams, Lanes

Slice = tuple[int, int]  # stage and microbatch, or a slice of one


class Offloaded(NamedTuple):
    """A storage of `size` bytes: the first ones are in `host`, the others in `rest`, if any."""

    storage: torch.UntypedStorage
    size: int
    host: torch.Tensor
    rest: torch.Tensor | None


class ActivationOffload:
    """The offloaded activations of one rank. `offload` and `reload` are called on the lanes of these instructions,
    `release` on the compute lane once that has waited for such an instruction.

    The compute lane allocates and frees the memory of the device, so an OFFLOAD or RELOAD may use what the compute
    before it has freed. Host buffers are reused by size: an OFFLOAD waits for a forward that is issued after `release`
    has returned its buffer. On a CPU the copies are real, but both sides are the same memory.
    """

    def __init__(self, lanes: Lanes) -> None:
        self.compute = lanes.compute if isinstance(lanes, CudaStreams) else None
        self.offloaded: dict[Slice, list[Offloaded]] = {}
        self.free_buffers: dict[int, list[torch.Tensor]] = defaultdict(list)  # by size

    def offload(self, key: Slice, storages: list[torch.UntypedStorage], fraction: float = 1.0) -> None:
        """OFFLOAD: copies this share of the storages' bytes to the host; the lane has waited for the forward."""
        sizes = [storage.nbytes() for storage in storages]
        self.offloaded[key] = []
        for storage, size, moved in zip(storages, sizes, cut(sizes, fraction).moved, strict=True):
            if not moved:
                continue
            source, host, rest = _bytes(storage), self._buffer(moved), None
            host.copy_(source[:moved], non_blocking=True)
            if moved < size:
                with self._memory_of_compute():
                    rest = torch.empty_like(source[moved:])
                rest.copy_(source[moved:])
            self.offloaded[key].append(Offloaded(storage, size, host, rest))

    def reload(self, key: Slice) -> None:
        """RELOAD: fills the storages again."""
        with self._memory_of_compute():
            for each in self.offloaded[key]:
                each.storage.resize_(each.size)
        for storage, _, host, rest in self.offloaded[key]:
            target = _bytes(storage)
            target[: host.nbytes].copy_(host, non_blocking=True)
            if rest is not None:
                target[host.nbytes :].copy_(rest)

    def release(self, waits: Iterable[Key]) -> None:
        """Frees what an instruction of the compute lane takes over from the OFFLOADs that it waits for, and the host's
        copies that it no longer needs once RELOADs have ended."""
        for op, stage, microbatch in waits:
            if op is Op.OFFLOAD:
                for each in self.offloaded[stage, microbatch]:
                    each.storage.resize_(0)
            elif op is Op.RELOAD:
                self._free(self.offloaded.pop((stage, microbatch)))

    def discard(self) -> None:
        """Drops everything on the host, after every copy has ended."""
        self._free(chain(*self.offloaded.values()))
        self.offloaded.clear()

    def _free(self, offloaded: Iterable[Offloaded]) -> None:
        for each in offloaded:
            self.free_buffers[each.host.nbytes].append(each.host)

    def _memory_of_compute(self) -> torch.cuda.StreamContext | nullcontext[None]:
        return torch.cuda.stream(self.compute) if self.compute is not None else nullcontext()

    def _buffer(self, size: int) -> torch.Tensor:
        if self.free_buffers[size]:
            return self.free_buffers[size].pop()
        return torch.empty(size, dtype=torch.uint8, pin_memory=self.compute is not None)


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """A new tensor on a storage: autograd does not see changes of it."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
