"""Words of host memory that the GPUs of a host wait for and write, and that its processes may write as well.

So a wait can be ended without the GPU's driver, whose calls may all be held up behind a stream that waits.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pentad.schedules.ir.errors import PentadError

LINE = 128  # bytes between words, so that no two share a cache line
PAST_ALL = 2**30 - 1  # a count that nobody reaches; words are compared in a circle of 2^32
RELEASE_SECONDS = 0.005
_PORTABLE_AND_MAPPED = 3
SHARED = Path("/dev/shm")


class StreamFlags:
    """`count` words, all 0, that the ranks which meet at `store` share; rank 0 makes the file, which has no name left
    when everybody has it open."""

    def __init__(self, store: dist.Store, rank: int, ranks: int, count: int, generation: int) -> None:
        from cuda.bindings import driver

        self.driver, key, size = driver, f"signals/{generation}", max(1, count) * LINE
        if rank == 0:
            descriptor, path = tempfile.mkstemp(prefix="pentad-signals-", dir=SHARED)
            os.ftruncate(descriptor, size)
            store.set(key, path)
        else:
            path = store.get(key).decode()
            try:
                descriptor = os.open(path, os.O_RDWR)
            except OSError as error:
                raise PentadError(
                    f"cluster.transport is peer, but rank {rank} does not share {SHARED} with rank 0 "
                    f"({error.strerror}): expected nccl"
                ) from None
        self.memory = mmap.mmap(descriptor, size)
        os.close(descriptor)
        if store.add(f"{key}/open", 1) == ranks:
            os.unlink(path)
        self.words = torch.frombuffer(self.memory, dtype=torch.int32)
        self.at = self.words.data_ptr()
        checked(driver.cuMemHostRegister(self.at, size, _PORTABLE_AND_MAPPED))
        self.closed = threading.Event()
        self.releasing: threading.Thread | None = None

    def write(self, word: int, value: int) -> None:
        """By the current stream, when it has done what was given to it before."""
        stream = torch.cuda.current_stream().cuda_stream
        checked(self.driver.cuStreamWriteValue32(stream, self.at + word * LINE, value & 0xFFFFFFFF, 0))

    def wait(self, word: int, value: int) -> None:
        """The current stream goes on when the word has reached the value; no SM waits for it."""
        stream = torch.cuda.current_stream().cuda_stream
        at_least = self.driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ
        checked(self.driver.cuStreamWaitValue32(stream, self.at + word * LINE, value & 0xFFFFFFFF, at_least))

    def release(self) -> None:
        """Ends every wait, of all ranks, and those that begin until `close`; from any thread.

        The GPU of a rank that has not heard yet, or that an aborted collective operation lets go on, still writes what
        its program says: so the words are set again and again.
        """
        if self.releasing is None:
            self.releasing = threading.Thread(target=self._release, daemon=True)
            self.releasing.start()

    def close(self) -> None:
        """After the last stream that uses it is done."""
        self.closed.set()
        if self.releasing is not None:
            self.releasing.join()
        checked(self.driver.cuMemHostUnregister(self.at))

    def _release(self) -> None:
        while not self.closed.is_set():
            self.words.fill_(PAST_ALL)
            self.closed.wait(RELEASE_SECONDS)


def checked(result: tuple[Any, ...]) -> None:
    """Raises RuntimeError for a call of the CUDA driver that failed."""
    if int(result[0]) != 0:
        raise RuntimeError(f"a call of the CUDA driver failed: {result[0]!r}")
