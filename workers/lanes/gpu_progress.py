"""How far a GPU has got: counts of completed instructions, and of the waits that the current instruction has reached
inside layers, which the GPU itself writes to host memory.

Asking the driver about an event can block while a stream waits; reading memory cannot.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping

import torch

from pentad.workers.lanes.progress_file import AXES, axis_number
from pentad.workers.transport.stream_flags import check_driver, handle_of

POLL_SECONDS = 5e-5
QUIET_SECONDS = 0.3
DRAIN_SECONDS = 4.0  # less than recovery.fence.FENCE_SECONDS, which the driver waits
LAYERS = "layers"  # the word for waits inside layers, after those of the lanes


class GpuProgress:
    """Issued and completed instructions by lane.

    The `wait_` methods call `check`, which may raise, while they wait.
    """

    def __init__(self, streams: Mapping[str, torch.cuda.Stream]) -> None:
        from cuda.bindings import driver

        self.driver, self.streams = driver, streams
        self.issued: Counter[str] = Counter()
        self.issued_before_step = 0  # on the compute lane
        self.words = torch.zeros(len(streams) + 1, dtype=torch.int32).pin_memory()
        self.address = {lane: self.words.data_ptr() + 4 * number for number, lane in enumerate((*streams, LAYERS))}
        self.counts, self.index = self.words.numpy()[:-1], {lane: number for number, lane in enumerate(streams)}
        self.issuing = 0  # instructions; an overlapped pair is two
        self.num_waits = 0  # in the layers of the action that is being issued

    def begin_step(self) -> None:
        self.issued_before_step = self.issued["compute"]
        self.end_waits()  # of layers run between steps

    def count(self, lane: str) -> None:
        """Counts an instruction that has been issued; the GPU counts it when it is complete."""
        self.issued[lane] += 1
        stream = self.streams[lane].cuda_stream
        check_driver(self.driver.cuStreamWriteValue32(stream, self.address[lane], self.issued[lane], 0))

    def end_waits(self) -> None:
        """Called when an action has been issued: counts the waits of the next one from 1."""
        if self.num_waits:
            self.num_waits = 0
            self._write_wait(0)

    def begin_wait(self, axis: str) -> None:
        """Marks that the current stream waits for an operation inside a layer. Not captured in CUDA graphs: one that
        also had NCCL kernels hung."""
        if torch.cuda.is_current_stream_capturing():
            return
        self.num_waits += 1
        self._write_wait(self.num_waits * len(AXES) + axis_number(axis))

    def end_wait(self) -> None:
        """Writes nothing: the next wait implies it."""

    def layer_wait(self) -> tuple[int, str]:
        """The number of waits inside layers that the compute lane has reached in its action, -1 before the first, and
        the axis of the last one. From any thread."""
        waits, axis = divmod(int(self.words[-1]), len(AXES))
        return waits or -1, AXES[axis]

    def _write_wait(self, number: int) -> None:
        check_driver(self.driver.cuStreamWriteValue32(handle_of(None), self.address[LAYERS], number, 0))

    def pending(self, lane: str = "compute") -> int:
        """Number of instructions of a lane that have been issued but not completed. From any thread."""
        return self.issued[lane] - int(self.counts[self.index[lane]])

    def wait_compute(self, check: Callable[[], None], pending: int) -> None:
        """Waits until at most `pending` instructions of the compute lane remain."""
        while self.pending() > pending:
            check()
            time.sleep(POLL_SECONDS)

    def wait_previous_step(self, check: Callable[[], None]) -> None:
        """Waits until the compute lane has completed all earlier steps."""
        self.wait_compute(check, self.issued["compute"] - self.issued_before_step)

    def wait_all(self, check: Callable[[], None], but: Mapping[str, int] | None = None) -> None:
        """Waits for everything issued, except for the newest `but[lane]` instructions of a lane."""
        left = but or {}
        until = [self.issued[lane] - left.get(lane, 0) for lane in self.streams]
        while any(int(count) < expected for count, expected in zip(self.counts, until, strict=True)):
            check()
            time.sleep(POLL_SECONDS)

    @property
    def is_idle(self) -> bool:
        """Whether everything issued is complete. From any thread."""
        return not self.issuing and not any(map(self.pending, self.index))

    def drain(self, longest_instruction: float) -> None:
        """Waits until everything is complete, or until no instruction has ended for longer than the longest one takes
        (transfers inside an instruction must not be cut short); at most DRAIN_SECONDS. From any thread, once no more
        instructions are issued; makes no CUDA driver calls."""
        quiet = max(QUIET_SECONDS, 1.5 * longest_instruction)
        last_change, completed = time.monotonic(), -1
        deadline = last_change + DRAIN_SECONDS
        while not self.is_idle and time.monotonic() < min(last_change + quiet, deadline):
            if (now := int(self.counts.sum())) != completed:
                last_change, completed = time.monotonic(), now
            time.sleep(0.01)
