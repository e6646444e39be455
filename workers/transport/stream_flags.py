"""Flags in host memory that the GPUs of a host wait for and write, and that its processes can write, too.

A process can thus end a wait without the CUDA driver, any call of which may block while a stream waits.
"""

from __future__ import annotations

import math
import mmap
import os
import tempfile
import threading
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from pentad.schedules.ir.errors import PentadError

FLAG_STRIDE = 128  # bytes: no two flags share a cache line
WORD = 4  # bytes of a flag
RELEASED = 2**30 - 1  # above any count and with every bit set; the driver compares modulo 2^32
RELEASE_SECONDS = 0.005
_PORTABLE_AND_MAPPED = 3
SHARED_MEMORY = Path("/dev/shm")


class FlagWrite(NamedTuple):
    flag: Hashable
    value: int


class FlagWait(NamedTuple):
    """A wait until the flag has the bit."""

    flag: Hashable
    bit: int


class StreamFlags:
    """Flags by name, shared by the `ranks` of a host, all of which pass the same `first` values in the same order.

    The first rank creates the file, which is unlinked once every rank has opened it. `cancelled`, a float64 scalar that
    these ranks share and a GPU can read, is nan from the first `release` on: what a GPU computes after a wait that was
    ended early is wrong, even if its rank has not been fenced yet.
    """

    def __init__(
        self, store: dist.Store, rank: int, ranks: Sequence[int], first: Mapping[Hashable, int], generation: int
    ) -> None:
        from cuda.bindings import driver

        self.driver, key, size = driver, f"flags/{generation}/{ranks[0]}", (1 + len(first)) * FLAG_STRIDE
        self.numbers = {name: number for number, name in enumerate(first, 1)}
        if rank == ranks[0]:
            descriptor, path = tempfile.mkstemp(prefix="pentad-flags-", dir=SHARED_MEMORY)
            words = np.zeros(size // WORD, np.int32)
            words[FLAG_STRIDE // WORD :: FLAG_STRIDE // WORD] = list(first.values())
            os.write(descriptor, words.tobytes())
            store.set(key, path)
        else:
            path = store.get(key).decode()
            try:
                descriptor = os.open(path, os.O_RDWR)
            except OSError as error:
                raise PentadError(
                    f"cluster.transport is peer: expected nccl (rank {rank} does not share {SHARED_MEMORY} with "
                    f"rank {ranks[0]}: {error.strerror})"
                ) from None
        self.memory = mmap.mmap(descriptor, size)
        os.close(descriptor)
        if store.add(f"{key}/opened", 1) == len(ranks):
            os.unlink(path)
        self.cancelled = torch.frombuffer(self.memory, dtype=torch.float64, count=1)[0]
        self.words = torch.frombuffer(self.memory, dtype=torch.int32, offset=FLAG_STRIDE)
        self.address = self.cancelled.data_ptr()
        check_driver(driver.cuMemHostRegister(self.address, size, _PORTABLE_AND_MAPPED))
        kinds = driver.CUstreamWaitValue_flags
        self.at_least, self.any_bit = kinds.CU_STREAM_WAIT_VALUE_GEQ, kinds.CU_STREAM_WAIT_VALUE_AND
        self.closed = threading.Event()
        self.releaser: threading.Thread | None = None

    def write(self, flag: Hashable, value: int, stream: int | None = None) -> None:
        """Enqueues a write on the stream with this handle; None is the current one."""
        check_driver(self.driver.cuStreamWriteValue32(handle_of(stream), self._address(flag), value & 0xFFFFFFFF, 0))

    def wait(self, flag: Hashable, value: int, stream: int | None = None) -> None:
        """Makes a stream wait until the flag has reached the value; no SM waits."""
        address = self._address(flag)
        check_driver(self.driver.cuStreamWaitValue32(handle_of(stream), address, value & 0xFFFFFFFF, self.at_least))

    def batch(self, steps: Sequence[FlagWrite | FlagWait]) -> list[Any]:
        """These steps, in order, as one operation for `run` to enqueue."""
        return [self._parameters(step) for step in steps]

    def run(self, batch: list[Any], stream: int | None = None) -> None:
        """Enqueues a batch. Six separate waits and writes take six times as long to issue, and twice as long on the
        GPU."""
        check_driver(self.driver.cuStreamBatchMemOp(handle_of(stream), len(batch), batch, 0))

    def release(self) -> None:
        """Ends all waits of these ranks, now and until `close`. From any thread.

        The GPU of a rank that does not know of the abort yet, or that an aborted collective has released, still writes
        what its program says, so the flags are overwritten repeatedly.
        """
        self.cancelled.fill_(math.nan)
        if self.releaser is None:
            self.releaser = threading.Thread(target=self._release, daemon=True)
            self.releaser.start()

    def close(self) -> None:
        """Call when the last stream that uses the flags is done; a second call does nothing."""
        if self.closed.is_set():
            return
        self.closed.set()
        if self.releaser is not None:
            self.releaser.join()
        check_driver(self.driver.cuMemHostUnregister(self.address))

    def _parameters(self, step: FlagWrite | FlagWait) -> Any:
        found, kinds = self.driver.CUstreamBatchMemOpParams(), self.driver.CUstreamBatchMemOpType
        if isinstance(step, FlagWrite):
            found.operation = found.writeValue.operation = kinds.CU_STREAM_MEM_OP_WRITE_VALUE_32
            found.writeValue.address, found.writeValue.value = self._address(step.flag), step.value
            found.writeValue.flags = 0
        else:
            found.operation = found.waitValue.operation = kinds.CU_STREAM_MEM_OP_WAIT_VALUE_32
            found.waitValue.address, found.waitValue.value = self._address(step.flag), step.bit
            found.waitValue.flags = int(self.any_bit)
        return found

    def _address(self, flag: Hashable) -> int:
        return self.address + self.numbers[flag] * FLAG_STRIDE

    def _release(self) -> None:
        while not self.closed.is_set():
            self.words.fill_(RELEASED)
            self.closed.wait(RELEASE_SECONDS)


def handle_of(stream: int | None) -> int:
    """The handle of a stream; None is the current one, for which torch's public functions would first make an object:
    3.6 us instead of 0.7."""
    return torch._C._cuda_getCurrentRawStream(torch.cuda.current_device()) if stream is None else stream


def check_driver(result: tuple[Any, ...]) -> None:
    """Raises RuntimeError if a CUDA driver call failed."""
    if int(result[0]) != 0:
        raise RuntimeError(f"a CUDA driver call failed: {result[0]!r}")
