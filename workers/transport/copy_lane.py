"""A stream beside compute on which copy engines read other ranks' memory."""

from __future__ import annotations

from itertools import cycle
from typing import Any, NamedTuple, Protocol

import torch

from pentad.workers.parallel.async_ops import Arrival
from pentad.workers.transport.stream_flags import check_driver, handle_of

EVENTS = 64  # far more than copies are in flight


class Lane(Protocol):
    """A stream; flags and memory know it by its `handle`."""

    handle: Any

    def follow(self) -> None:
        """Makes the lane wait for everything enqueued on the current stream so far."""
        ...

    def end(self) -> Arrival:
        """The arrival of everything enqueued on the lane so far."""
        ...


class CudaLane:
    """The lane of a stream. Its events are reused cyclically, long after anything waited for them. They are the
    driver's own, which take streams by their handles."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        from cuda.bindings import driver

        self.driver, self.stream, self.handle = driver, stream, int(stream.cuda_stream)
        self.events = cycle([self._new_event() for _ in range(EVENTS)])

    def follow(self) -> None:
        event = next(self.events)
        check_driver(self.driver.cuEventRecord(event, handle_of(None)))
        check_driver(self.driver.cuStreamWaitEvent(self.handle, event, 0))

    def end(self) -> Arrival:
        event = next(self.events)
        check_driver(self.driver.cuEventRecord(event, self.handle))
        return _LaneEnd(self.driver, event)

    def _new_event(self) -> Any:
        result = self.driver.cuEventCreate(self.driver.CUevent_flags.CU_EVENT_DISABLE_TIMING)
        check_driver(result)
        return result[1]


class _LaneEnd(NamedTuple):
    driver: Any
    event: Any

    def wait(self) -> None:
        check_driver(self.driver.cuStreamWaitEvent(handle_of(None), self.event, 0))
