"""Host memory that a GPU copies from and to at full speed."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch

from pentad.schedules.ir.errors import PentadError


class HostMemory:
    """`buffer` [bytes], pinned where the device is a GPU. `close` it when nothing is copied to it any more, before the
    buffer is freed."""

    def __init__(self, size: int, device: torch.device, what: str) -> None:
        """Takes seconds for many GB. Raises PentadError, which names `what` the memory is for, if there is too
        little."""
        try:
            self.buffer = torch.empty(size, dtype=torch.uint8)
        except RuntimeError as error:
            raise PentadError(f"{what} {size} bytes of host memory on this rank, which there are not") from error
        self.close: Callable[[], object] = lambda: None
        if device.type != "cuda" or not size:
            return
        cuda, address = torch.cuda.cudart(), self.buffer.data_ptr()
        # torch's own pinned memory is of a power of two: up to twice as much.
        if int(cuda.cudaHostRegister(address, size, 0)) != 0:
            text = f"{what} {size} bytes of pinned host memory on this rank, which there are not"
            raise PentadError(f"{text}: expected a host with more, or more ranks to divide the state among")
        self.close = weakref.finalize(self, cuda.cudaHostUnregister, address)
