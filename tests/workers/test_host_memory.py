"""The laws of host memory."""

import threading

import pytest
import torch

from pentad.schedules.ir.errors import PentadError
from pentad.workers.background import awaited, in_background
from pentad.workers.host_memory import HostMemory, fill

CPU = torch.device("cpu")


@pytest.mark.parametrize("size", [0, 1, 4096, 3_000_001])
def test_a_buffer_has_the_bytes_that_were_asked_for(size: int) -> None:
    memory = HostMemory(size, CPU, "a test needs")
    assert memory.buffer.numel() == size
    memory.buffer.fill_(7)
    fill(memory.buffer, part_bytes=1000)
    assert not memory.buffer.any()
    memory.close()


@pytest.mark.parametrize("size", [2**61, 2**62, 2**70])
def test_more_than_there_is_is_refused_in_a_sentence(size: int) -> None:
    with pytest.raises(PentadError, match=f"^a test needs {size} bytes of host memory"):
        HostMemory(size, CPU, "a test needs")


def test_what_a_reservation_raises_is_raised_where_it_is_waited_for() -> None:
    reservation = in_background(lambda: HostMemory(2**62, CPU, "a test needs"))
    with pytest.raises(PentadError, match="a test needs"):
        reservation.result(20)


def test_a_fence_ends_the_wait_for_a_reservation() -> None:
    end, checks = threading.Event(), list[int]()

    def reserve() -> HostMemory:
        assert end.wait(20)
        return HostMemory(1, CPU, "a test needs")

    def fenced() -> None:
        checks.append(1)
        if len(checks) == 3:
            raise InterruptedError

    reservation = in_background(reserve)
    with pytest.raises(InterruptedError):
        awaited(reservation, fenced)
    end.set()
    assert awaited(reservation, lambda: None).buffer.numel() == 1
