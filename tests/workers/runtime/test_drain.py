"""A GPU that is to run out is given the time that its instructions take, and not for ever."""

from __future__ import annotations

import math
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pentad.orchestrator.run.regroup import FENCE_SECONDS
from pentad.workers.runtime import abort
from pentad.workers.runtime.runner import Runner


class Lanes:
    """Instructions that end at these moments, in seconds from the first look."""

    def __init__(self, ends: list[float]) -> None:
        self.ends, self.began = ends, 0.0

    def done(self) -> int:
        self.began = self.began or time.monotonic()
        return sum(time.monotonic() >= self.began + end for end in self.ends)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("ends", "longest", "least"),
    [
        ([], 0.01, 0.3),
        ([0.2, 0.4], 0.01, 0.7),
        ([0.5, 1.0], 0.5, 1.75),  # within 0.3 s nothing ends, and yet it computes
        ([], 100.0, abort.RUN_OUT_SECONDS),
        ([0.1 * n for n in range(90)], 0.01, abort.RUN_OUT_SECONDS),
    ],
)
def test_nothing_is_cut_short_that_ends_by_itself(ends, longest, least):
    lanes: Any = Lanes(ends)
    released: list[bool] = []
    executor: Any = SimpleNamespace(end=SimpleNamespace(fence=torch.zeros(())))
    signals: Any = SimpleNamespace(release=lambda: released.append(math.isnan(executor.end.fence)))
    began = time.monotonic()
    abort.run_out(executor, signals, lanes, longest)
    assert released == [True], "what goes on after the fence must not count"
    assert least <= time.monotonic() - began < least + 2.0
    assert abort.RUN_OUT_SECONDS < FENCE_SECONDS, "the driver gives up who does not answer in time"


def test_the_longest_instruction_is_one_that_computes_in_the_newest_step():
    def step(*spans: tuple[str, float]) -> SimpleNamespace:
        return SimpleNamespace(spans=[SimpleNamespace(lane=lane, start=1.0, end=1.0 + size) for lane, size in spans])

    runner: Any = SimpleNamespace(kept=[[step(("compute", 8.0))], [step(("compute", 4.0)), step(("compute", 2.0))], []])
    assert Runner._longest(runner) == 2.0
    runner.kept.append([step(("compute", 0.5), ("compute", 0.25), ("send 1", 6.0))])
    assert Runner._longest(runner) == 0.5
    runner.kept.clear()
    assert Runner._longest(runner) == 0.0
