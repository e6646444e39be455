"""OFFLOAD and RELOAD: keeps activations in host memory while others need the device's.

Storages are moved, not tensors: a storage is emptied, and later filled again under the tensors that view it, some of
which only an autograd graph refers to.
"""

from __future__ import annotations

from collections import defaultdict
from contextlib import nullcontext
from itertools import chain

import torch

from pentad.workers.runtime.streams import CudaStreams, Lanes

Slice = tuple[int, int]  # stage and microbatch, or a slice of one


class ActivationOffload:
    """The offloaded activations of one rank. `offload` and `reload` are called on the copy lane.

    Host buffers are reused by size; the order of the lane keeps their copies apart. On a CPU the copies are real, but
    both sides are the same memory.
    """

    def __init__(self, lanes: Lanes) -> None:
        self.compute = lanes.compute if isinstance(lanes, CudaStreams) else None
        self.offloaded: dict[Slice, list[tuple[torch.UntypedStorage, torch.Tensor]]] = {}
        self.free_buffers: dict[int, list[torch.Tensor]] = defaultdict(list)  # by size

    def offload(self, key: Slice, storages: list[torch.UntypedStorage]) -> None:
        """OFFLOAD: copies the storages to the host and empties them; the lane has waited for the forward."""
        self.offloaded[key] = [(storage, self._buffer(storage.nbytes())) for storage in storages]
        for storage, buffer in self.offloaded[key]:
            source = _bytes(storage)
            buffer.copy_(source, non_blocking=True)
            if self.compute is not None:  # the next owner of this memory waits for the copy
                source.record_stream(torch.cuda.current_stream())
            del source
            storage.resize_(0)

    def reload(self, key: Slice) -> None:
        """RELOAD: fills the storages again; their readers wait for this lane."""
        copies = self.offloaded.pop(key)
        # The compute lane allocated the memory first and will free it.
        with torch.cuda.stream(self.compute) if self.compute is not None else nullcontext():
            for storage, buffer in copies:
                storage.resize_(buffer.nbytes)
        if self.compute is not None:  # compute issued before may still use the memory just allocated
            torch.cuda.current_stream().wait_stream(self.compute)
        for storage, buffer in copies:
            _bytes(storage).copy_(buffer, non_blocking=True)
            self.free_buffers[buffer.nbytes].append(buffer)

    def discard(self) -> None:
        """Drops everything on the host, after every copy has ended."""
        for _, buffer in chain(*self.offloaded.values()):
            self.free_buffers[buffer.nbytes].append(buffer)
        self.offloaded.clear()

    def _buffer(self, size: int) -> torch.Tensor:
        if self.free_buffers[size]:
            return self.free_buffers[size].pop()
        return torch.empty(size, dtype=torch.uint8, pin_memory=self.compute is not None)


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """A new tensor on a storage: autograd does not see changes of it."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
