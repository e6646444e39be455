"""How far a GPU is behind its host: counts of completed instructions that the GPU itself writes to host memory.

Asking the driver about an event can block behind a stream that waits; reading memory cannot.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping

import torch

from pentad.workers.transport.stream_flags import check_driver

POLL_SECONDS = 5e-5


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

    def completed(self) -> int:
        """Completed instructions of all lanes. From any thread."""
        return int(self.counts.sum())

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
