"""How far a GPU has got: counts of completed instructions, which the GPU itself writes to host memory.

Asking the driver about an event can block while a stream waits; reading memory cannot.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping

import torch

from pentad.workers.transport.stream_flags import check_driver

POLL_SECONDS = 5e-5
QUIET_SECONDS = 0.3
DRAIN_SECONDS = 4.0  # the driver waits fence.FENCE_SECONDS


class GpuProgress:
    """Issued and completed instructions by lane.

    The `wait_` methods call `check`, which may raise, while they wait.
    """

    def __init__(self, streams: Mapping[str, torch.cuda.Stream]) -> None:
        from cuda.bindings import driver

        self.driver, self.streams = driver, streams
        self.issued: Counter[str] = Counter()
        self.issued_before_step = 0  # on the compute lane
        self.words = torch.zeros(len(streams), dtype=torch.int32).pin_memory()
        self.address = {lane: self.words.data_ptr() + 4 * number for number, lane in enumerate(streams)}
        self.counts, self.compute = self.words.numpy(), list(streams).index("compute")

    def begin_step(self) -> None:
        self.issued_before_step = self.issued["compute"]

    def count(self, lane: str) -> None:
        """Counts an instruction that has been issued; the GPU counts it when it is complete."""
        self.issued[lane] += 1
        stream = self.streams[lane].cuda_stream
        check_driver(self.driver.cuStreamWriteValue32(stream, self.address[lane], self.issued[lane], 0))

    def compute_pending(self) -> int:
        """Instructions of the compute lane that are not complete. From any thread."""
        return self.issued["compute"] - int(self.counts[self.compute])

    def wait_compute(self, check: Callable[[], None], pending: int) -> None:
        """Waits until at most `pending` instructions of the compute lane are not complete."""
        while self.compute_pending() > pending:
            check()
            time.sleep(POLL_SECONDS)

    def wait_previous_step(self, check: Callable[[], None]) -> None:
        """Waits until the compute lane has completed the earlier steps."""
        self.wait_compute(check, self.issued["compute"] - self.issued_before_step)

    def wait_all(self, check: Callable[[], None], but: Mapping[str, int] | None = None) -> None:
        """Waits for everything issued, except for the newest `but[lane]` instructions of a lane."""
        left = but or {}
        until = [self.issued[lane] - left.get(lane, 0) for lane in self.streams]
        while any(int(count) < expected for count, expected in zip(self.counts, until, strict=True)):
            check()
            time.sleep(POLL_SECONDS)

    def drain(self, longest_instruction: float) -> None:
        """Waits until no instruction has ended for longer than the longest one takes, as transfers inside an
        instruction must not be cut short; at most DRAIN_SECONDS. From any thread; makes no calls of the CUDA driver."""
        quiet = max(QUIET_SECONDS, 1.5 * longest_instruction)
        last_change, completed = time.monotonic(), -1
        deadline = last_change + DRAIN_SECONDS
        while time.monotonic() < min(last_change + quiet, deadline):
            if (now := int(self.counts.sum())) != completed:
                last_change, completed = time.monotonic(), now
            time.sleep(0.01)
