"""On a GPU the host only issues instructions: it never waits for the device during a step."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from gpus import on_gpu
from plans import plan_of

from pentad.schedules.spec.plan import Plan
from pentad.workers.runtime.runner import Runner

pytestmark = pytest.mark.gpu


@contextmanager
def connected(plan: Plan, folder: Path) -> Iterator[Runner]:
    runner = Runner(plan, 0, folder / "progress")
    runner.connect(runner.serve("127.0.0.1", 30), 30)
    runner.restore(None)
    try:
        yield runner
    finally:
        torch.cuda.set_sync_debug_mode("default")
        runner.close()


@pytest.mark.parametrize("name", ["1f1b", "zb-h2"])
def test_no_step_waits_for_the_device(corpus, tmp_path, name):
    with connected(on_gpu(plan_of(name, 1, 1, 4, corpus), "nccl", "bfloat16"), tmp_path) as runner:
        assert runner.executor is not None
        runner.run(0, 2)
        tokens = runner.load_batch(2)
        torch.cuda.set_sync_debug_mode("error")
        runner.executor.run(runner.programs[0], 2, tokens)


@pytest.mark.parametrize("post_validation", [True, False])
def test_a_call_with_an_open_step_does_not_wait_for_the_device(corpus, tmp_path, monkeypatch, post_validation):
    plan = plan_of("zb-h2", 1, 1, 4, corpus, post_validation=post_validation)
    with connected(on_gpu(plan, "nccl", "bfloat16"), tmp_path) as runner:
        results = runner.run(0, 2) + runner.run(2, 1, True)
        with monkeypatch.context() as patch:
            patch.setattr(torch.cuda, "synchronize", None)
            torch.cuda.set_sync_debug_mode("error")
            results += runner.run(3, 2, True) + runner.run(5, 1, True)
            torch.cuda.set_sync_debug_mode("default")
        results += runner.run(6, 0)
    assert [result.step for result in results] == [0, 1, 2, 3, 4, 5]


def test_times_of_consecutive_steps_are_in_order_on_the_host_s_clock(corpus, tmp_path):
    with connected(on_gpu(plan_of("zb-h2", 1, 1, 4, corpus), "nccl", "bfloat16"), tmp_path) as runner:
        runner.run(0, 2)
        started = time.monotonic()
        results = [result for step in range(2, 12) for result in runner.run(step, 1, True)] + runner.run(12, 0)
        ended = time.monotonic()
    spans = [sorted((s.start, s.end) for s in result.spans if s.lane == "compute") for result in results]
    delay = 1e-3  # until the host sees an event
    assert started - delay < spans[0][0][0] and spans[-1][-1][1] < ended + delay
    for before, after in pairwise(spans):
        assert before[-1][1] < after[0][0] + delay
    assert all(a[1] <= b[0] + 1e-6 for step in spans for a, b in pairwise(step))
