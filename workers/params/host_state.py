"""Optimizer state and master weights in host memory, updated by streaming them through the device.

A shard is updated piece by piece. While one piece is updated on the device, the next ones arrive and earlier ones
return, on streams of their own, so that both directions of the host link are busy. The kernels, and so the bits, are
those of state that lives on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch

from pentad.schedules.spec.optimizer import PIECE_ELEMENTS, PIECES
from pentad.workers.host_memory import HostMemory

Update = Callable[[Sequence[torch.Tensor]], None]


class HostShard:
    """The state of a shard: flat tensors of these lengths and dtypes, initially zero, in one piece of host memory;
    `stream` carries it through the device."""

    def __init__(self, shapes: Sequence[tuple[int, torch.dtype]], stream: StateStream) -> None:
        device, self.stream = stream.device, stream
        sizes = [count * dtype.itemsize for count, dtype in shapes]
        self.memory = HostMemory(sum(sizes), device, "memory.optimizer = host needs")
        self.memory.buffer.zero_()
        parts = self.memory.buffer.split(sizes)
        self.tensors = [part.view(dtype) for part, (_, dtype) in zip(parts, shapes, strict=True)]


class _Slot:
    """Device memory for one piece, and the events between the streams that use it."""

    def __init__(self, dtypes: Sequence[torch.dtype], device: torch.device) -> None:
        self.tensors = [torch.empty(PIECE_ELEMENTS, dtype=dtype, device=device) for dtype in dtypes]
        events = [torch.cuda.Event() if device.type == "cuda" else None for _ in range(3)]
        self.arrived, self.updated, self.returned = events


class StateStream:
    """Streams a rank's state through its device. Call `run` for every shard of a step, then `finish`."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.slots, self.number = device, list[_Slot](), 0
        self.streams = [torch.cuda.Stream(device) for _ in range(2)] if device.type == "cuda" else []

    def run(self, state: Sequence[torch.Tensor], update: Update) -> None:
        """Updates equally long tensors on the host piece by piece; `update` gets each piece on the device and changes
        it in place. The tensors of every call have the same dtypes."""
        if not self.slots:
            self.slots = [_Slot([each.dtype for each in state], self.device) for _ in range(PIECES)]
            for stream in self.streams:  # kernels issued before may still use the slots' memory
                stream.wait_stream(torch.cuda.current_stream(self.device))
        for pieces in zip(*(each.split(PIECE_ELEMENTS) for each in state), strict=True):
            slot = self.slots[self.number % PIECES]
            self.number += 1
            moved = [tensor[: len(piece)] for tensor, piece in zip(slot.tensors, pieces, strict=True)]
            self._copy(pieces, moved, 0, slot.returned, slot.arrived)
            self._wait(slot.arrived)
            update(moved)
            if slot.updated is not None:
                slot.updated.record()
            self._copy(moved, pieces, 1, slot.updated, slot.returned)

    def finish(self) -> None:
        """Makes the current stream, and later copies to the device, wait until all state is back on the host."""
        if self.streams:
            to_device, to_host = self.streams
            to_device.wait_stream(to_host)
            torch.cuda.current_stream(self.device).wait_stream(to_device)

    def _copy(
        self,
        sources: Sequence[torch.Tensor],
        targets: Sequence[torch.Tensor],
        way: int,
        after: torch.cuda.Event | None,
        end: torch.cuda.Event | None,
    ) -> None:
        with torch.cuda.stream(self.streams[way]) if self.streams else nullcontext():
            if after is not None:
                self.streams[way].wait_event(after)
            for source, target in zip(sources, targets, strict=True):
                target.copy_(source, non_blocking=True)
            if end is not None:
                end.record()

    def _wait(self, event: torch.cuda.Event | None) -> None:
        if event is not None:
            torch.cuda.current_stream(self.device).wait_event(event)
