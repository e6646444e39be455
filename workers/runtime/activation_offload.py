"""OFFLOAD and RELOAD: activations wait in the host's memory while others need the device's.

What is moved is memory, not tensors: a storage is emptied and later filled again under the tensors that view it, some
of which only autograd's graph of attention knows.
"""

from __future__ import annotations

from collections import defaultdict

import torch

from pentad.workers.runtime.streams import CudaStreams, Lanes

Piece = tuple[int, int]  # stage and microbatch


class ActivationOffload:
    """What one rank has on the host, piece by piece. `send` and `bring_back` are called on the lane of copies.

    Buffers on the host are used again by size: the lane's order keeps one copy from another. On a CPU both sides are
    the same memory, and the copies are as real.
    """

    def __init__(self, lanes: Lanes) -> None:
        self.compute = lanes.compute if isinstance(lanes, CudaStreams) else None
        self.held: dict[Piece, list[tuple[torch.UntypedStorage, torch.Tensor]]] = {}
        self.spare: dict[int, list[torch.Tensor]] = defaultdict(list)  # by size

    def send(self, piece: Piece, storages: list[torch.UntypedStorage]) -> None:
        """OFFLOAD: copies the storages and empties them; the piece's forward has ended on this lane."""
        self.held[piece] = [(storage, self._buffer(storage.nbytes())) for storage in storages]
        for storage, there in self.held[piece]:
            here = _bytes(storage)
            there.copy_(here, non_blocking=True)
            if self.compute is not None:  # whoever gets this memory next waits for the copy
                here.record_stream(torch.cuda.current_stream())
            del here
            storage.resize_(0)

    def bring_back(self, piece: Piece) -> None:
        """RELOAD: fills the storages again; whoever reads them waits for this lane."""
        pairs = self.held.pop(piece)
        for storage, there in pairs:
            self._grow(storage, there.nbytes)
        if self.compute is not None:  # what is filled here was others' until the compute before this place had ended
            torch.cuda.current_stream().wait_stream(self.compute)
        for storage, there in pairs:
            _bytes(storage).copy_(there, non_blocking=True)
            self.spare[there.nbytes].append(there)

    def forget(self) -> None:
        """Gives up all that is on the host; every copy has ended."""
        for pairs in self.held.values():
            for _, there in pairs:
                self.spare[there.nbytes].append(there)
        self.held.clear()

    def _grow(self, storage: torch.UntypedStorage, size: int) -> None:
        """In the memory of the compute lane, where it came from and will go."""
        if self.compute is None:
            storage.resize_(size)
            return
        with torch.cuda.stream(self.compute):
            storage.resize_(size)

    def _buffer(self, size: int) -> torch.Tensor:
        if self.spare[size]:
            return self.spare[size].pop()
        return torch.empty(size, dtype=torch.uint8, pin_memory=self.compute is not None)


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """A storage as a tensor of its own: autograd sees no change of those that are in its graphs."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
