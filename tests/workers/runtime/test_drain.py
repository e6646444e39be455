"""Draining gives a GPU the time its instructions take, but not unlimited time."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from pentad.orchestrator.run.regroup import FENCE_SECONDS
from pentad.workers.runtime import abort
from pentad.workers.runtime.runner import Runner


class FakeLanes:
    """Instructions that end at these times, in seconds after the first look."""

    def __init__(self, ends: list[float]) -> None:
        self.ends, self.started, self.progress = ends, 0.0, self

    def completed(self) -> int:
        self.started = self.started or time.monotonic()
        return sum(time.monotonic() >= self.started + end for end in self.ends)


@pytest.mark.parametrize(
    ("ends", "longest", "at_least"),
    [
        ([], 0.01, 0.1),
        ([0.06, 0.12], 0.01, 0.22),
        ([0.25, 0.5], 0.25, 0.875),  # computes, although nothing ends for longer than QUIET_SECONDS
        ([], 100.0, 1.2),
        ([0.03 * n for n in range(90)], 0.01, 1.2),
    ],
)
def test_drain_waits_for_instructions_that_end(monkeypatch, ends, longest, at_least):
    assert abort.DRAIN_SECONDS < FENCE_SECONDS, "the driver gives up on a rank that does not answer in time"
    monkeypatch.setattr(abort, "QUIET_SECONDS", 0.1)
    monkeypatch.setattr(abort, "DRAIN_SECONDS", 1.2)
    lanes: Any = FakeLanes(ends)
    calls: list[str] = []
    optimizer_step: Any = SimpleNamespace(cancel=lambda: calls.append("cancel"))
    transport: Any = SimpleNamespace(release=lambda: calls.append("release"))
    started = time.monotonic()
    abort.drain(lanes, optimizer_step, transport, longest)
    assert calls == ["cancel", "release"], "no step may count that runs after the release"
    assert at_least <= time.monotonic() - started < at_least + 1.0


def test_longest_instruction_is_of_compute_in_the_newest_step():
    def step(*spans: tuple[str, float]) -> SimpleNamespace:
        return SimpleNamespace(spans=[SimpleNamespace(lane=lane, start=1.0, end=1.0 + size) for lane, size in spans])

    calls = [[step(("compute", 8.0))], [step(("compute", 4.0)), step(("compute", 2.0))], []]
    runner: Any = SimpleNamespace(recent_calls=calls)
    assert Runner._longest_instruction(runner) == 2.0
    calls.append([step(("compute", 0.5), ("compute", 0.25), ("send 1", 6.0))])
    assert Runner._longest_instruction(runner) == 0.5
    calls.clear()
    assert Runner._longest_instruction(runner) == 0.0
