"""Host memory that a GPU copies from and to at full speed."""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

import torch

from pentad.schedules.ir.errors import PentadError

PART_BYTES = 256 << 20  # filled by a thread at a time
MOST_THREADS = 8  # per rank: other ranks of the host do the same


class HostMemory:
    """`buffer` [bytes], pinned if the device is a GPU. Call `close` when nothing is copied to or from it any more,
    before the buffer is freed."""

    def __init__(self, size: int, device: torch.device, what: str) -> None:
        """Raises PentadError, naming `what` the memory is for, if there is too little."""
        try:
            pages = mmap.mmap(-1, max(1, size), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError) as error:
            raise PentadError(f"{what} {size} bytes of host memory on this rank, which there are not") from error
        self.buffer = torch.frombuffer(pages, dtype=torch.uint8)[:size]
        self.close: Callable[[], object] = lambda: None
        if device.type != "cuda" or not size:
            return
        with suppress(OSError):  # a kernel without huge pages
            pages.madvise(mmap.MADV_HUGEPAGE)
        fill(self.buffer)
        cuda, address = torch.cuda.cudart(), self.buffer.data_ptr()
        # torch rounds its own pinned memory up to a power of two, up to twice as much.
        if int(cuda.cudaHostRegister(address, size, 0)) != 0:
            text = f"{what} {size} bytes of pinned host memory on this rank, which there are not"
            raise PentadError(f"{text}: expected a host with more, or more ranks to divide the state among")
        self.close = weakref.finalize(self, cuda.cudaHostUnregister, address)


def available_bytes() -> int:
    """Bytes of host memory available on this host, as estimated by its kernel."""
    with open("/proc/meminfo", encoding="ascii") as lines:
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))


# For memory that a rank's first steps do not need: pinning 18 GiB took 3.6 s.
Reservation = Future[HostMemory]


def fill(buffer: torch.Tensor, part_bytes: int = PART_BYTES) -> None:
    """Has the kernel provide all pages now; while pinning it would do so one by one, at 3 GB/s."""
    with ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1)) as threads:
        for _ in threads.map(torch.Tensor.zero_, buffer.split(part_bytes)):
            pass
