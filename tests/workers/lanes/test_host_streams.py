"""A CPU rank's waits for a core are counted once, within an instruction or between two. An abort may abandon a wait,
and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pytest
import torch

from pentad.schedules.ir.instruction import Instruction, Op
from pentad.workers.lanes import streams
from pentad.workers.lanes.streams import HostStreams
from pentad.workers.parallel.async_ops import ContinuedWork, LayerWork, host_waits, ready
from pentad.workers.rank_waits import rank_waits

PART = Instruction(Op.F, stage=1, microbatch=0)


class Clock:
    """Seconds that this thread has waited for a core so far."""

    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


class SlowWork:
    """An operation after which the thread waits for a core for `seconds`."""

    def __init__(self, clock: Clock, seconds: float) -> None:
        self.clock, self.seconds = clock, seconds

    def wait(self) -> None:
        self.clock.seconds += self.seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(streams, "run_delay", made)
    for name, value in (("run_delay", 0.0), ("delay_clock", made), ("log", None)):
        monkeypatch.setattr(host_waits, name, value)
    return made


def test_what_a_thread_waits_for_a_core_is_counted_where_it_happens(clock: Clock) -> None:
    lanes = HostStreams()
    clock.seconds = 100.0  # before the step
    lanes.begin_step()
    for _ in range(2):
        clock.seconds += 0.25
        with lanes.issue(PART):
            clock.seconds += 1.0
            host_waits.wait([LayerWork(SlowWork(clock, 4.0), None)])  # type: ignore[arg-type]
            clock.seconds += 0.5
    lanes.read_times(lambda: None)
    found = lanes.take_waits()
    assert found["starved"] == (("HOST", -1, 0.5), ("F", 1, 3.0))
    assert [(op, stage) for op, stage, _ in found["layer_waits"]] == [("F", 1)]


def test_what_needs_no_communication_is_not_waited_for(clock: Clock) -> None:
    """Reading clocks takes 1 % of a small model's step, and would appear as communication on meshes without any."""
    lanes = HostStreams()
    lanes.begin_step()
    with lanes.issue(PART):
        assert ready(1).wait() == 1
    lanes.read_times(lambda: None)
    assert lanes.take_waits()["layer_waits"] == ()


def test_a_transfer_ends_when_its_waiter_could_run_again(clock: Clock) -> None:
    """Waiting for a core after that is not the link's time."""
    lanes, receive = HostStreams(), Instruction(Op.RECV_F, stage=1, microbatch=0, peer=0)
    lanes.begin_step()
    with lanes.issue(receive):
        lanes.end_with(receive, [SlowWork(clock, 5.0)])
    with lanes.issue(PART._replace(waits=(receive.key,))):
        pass
    ((_, start, end), _) = lanes.read_times(lambda: None)[0]
    assert start <= end < start + 5.0
    assert lanes.take_waits()["starved"] == (("HOST", -1, 5.0),)


def test_a_discarded_step_is_counted_anew(clock: Clock) -> None:
    lanes = HostStreams()
    lanes.begin_step()
    with lanes.issue(PART):
        clock.seconds += 1.0
    lanes.discard_step(lambda: None)
    with lanes.issue(PART):
        clock.seconds += 2.0
    lanes.read_times(lambda: None)
    assert lanes.take_waits()["starved"] == (("F", 1, 2.0),)


def test_what_follows_an_operation_is_outside_the_wait_that_an_abort_may_leave_behind(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = list[str]()

    @contextmanager
    def abandonable() -> Iterator[None]:
        yield
        found.append("waited")

    monkeypatch.setattr(rank_waits, "abandonable", abandonable)
    lanes, reduction = HostStreams(), Instruction(Op.ALL_REDUCE, stage=1)
    lanes.begin_step()
    with lanes.issue(reduction):
        works = (ContinuedWork(SlowWork(clock, 1.0), partial(found.append, name), torch.empty(0)) for name in "ab")
        lanes.end_with(reduction, list(works))
    with lanes.issue(PART._replace(waits=(reduction.key,))):
        pass
    assert found == ["waited", "a", "waited", "b"]
