"""Draining gives a GPU the time its instructions take, but not unlimited time."""

from __future__ import annotations

import time
from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pentad.orchestrator.recovery.fence import FENCE_SECONDS
from pentad.workers.abort import Fence
from pentad.workers.lanes import gpu_progress
from pentad.workers.lanes.gpu_progress import GpuProgress
from pentad.workers.lanes.streams import CudaStreams
from pentad.workers.runtime.results import longest_instruction
from pentad.workers.runtime.runner import Runner


class Counts:
    """Counters of instructions that end at these times, in seconds after the first look."""

    def __init__(self, ends: list[float]) -> None:
        self.ends, self.started = ends, 0.0

    def sum(self) -> int:
        self.started = self.started or time.monotonic()
        return sum(time.monotonic() >= self.started + end for end in self.ends)


def step(*computed: float, sent: float = 0.0) -> Any:
    """A step whose instructions took this many seconds."""
    spans = [*(("compute", seconds) for seconds in computed), ("send 1", sent)]
    return SimpleNamespace(spans=[SimpleNamespace(lane=lane, start=1.0, end=1.0 + size) for lane, size in spans])


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("ends", "longest", "at_least"),
    [
        ([], 0.01, 0.1),
        ([0.06, 0.12], 0.01, 0.22),
        ([0.25, 0.5], 0.25, 0.875),  # still computes, although nothing ends for longer than QUIET_SECONDS
        ([], 100.0, 1.2),
        ([0.03 * n for n in range(90)], 0.01, 1.2),
    ],
)
def test_drain_waits_for_instructions_that_end(monkeypatch, ends, longest, at_least):
    assert gpu_progress.DRAIN_SECONDS < FENCE_SECONDS, "the driver gives up on a rank that does not answer in time"
    monkeypatch.setattr(gpu_progress, "QUIET_SECONDS", 0.1)
    monkeypatch.setattr(gpu_progress, "DRAIN_SECONDS", 1.2)
    calls: list[str] = []
    lanes = CudaStreams.__new__(CudaStreams)
    lanes.progress = GpuProgress.__new__(GpuProgress)
    lanes.progress.counts = Counts(ends)  # type: ignore[assignment]
    lanes.progress.issuing = 1
    executor = SimpleNamespace(
        lanes=lanes,
        optimizer_step=SimpleNamespace(cancel=lambda: calls.append("cancel")),
        transport=SimpleNamespace(release=lambda: calls.append("release")),
    )
    runner: Any = SimpleNamespace(executor=executor, fence_flag=Fence(), sockets=None, recent_calls=[[step(longest)]])
    started = time.monotonic()
    Runner.fence(runner)
    assert runner.fence_flag.is_set
    assert calls == ["cancel", "release"], "no step may count that runs after the release"
    assert at_least <= time.monotonic() - started < at_least + 1.0


@pytest.mark.parametrize(("issuing", "pending", "at_least"), [(0, 0, 0.0), (1, 0, 0.3), (0, 1, 0.3)])
def test_a_gpu_that_has_completed_all_is_not_waited_for(issuing: int, pending: int, at_least: float) -> None:
    progress = GpuProgress.__new__(GpuProgress)
    progress.issuing, progress.counts, progress.index = issuing, np.array([7]), {"compute": 0}
    progress.issued = Counter(compute=7 + pending)
    started = time.monotonic()
    progress.drain(0.01)
    assert at_least <= time.monotonic() - started < at_least + 0.2


def test_longest_instruction_is_of_compute_in_the_newest_step():
    calls = [[step(8.0)], [step(4.0), step(2.0)], []]
    assert longest_instruction(calls) == 2.0
    calls.append([step(0.5, 0.25, sent=6.0)])
    assert longest_instruction(calls) == 0.5
    assert longest_instruction([]) == 0.0
