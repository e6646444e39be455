"""On a GPU the host only issues: nothing in a step waits for the device."""

from __future__ import annotations

import time
from itertools import pairwise

import pytest
import torch
from gpu_cases import on_gpu
from plans import plan_of

from pentad.workers.runtime.runner import Runner

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", ["1f1b", "zb-h2"])
def test_no_step_waits_for_the_device(corpus, tmp_path, name):
    plan = on_gpu(plan_of(name, 1, 1, 4, corpus), "nccl", "bfloat16")
    runner = Runner(plan, 0, tmp_path / "board")
    runner.connect(runner.serve("127.0.0.1", 30), 30)
    assert runner.executor is not None
    try:
        runner.run(0, 2)
        tokens = runner.feed(2)
        torch.cuda.set_sync_debug_mode("error")
        runner.executor.run(2, tokens)
    finally:
        torch.cuda.set_sync_debug_mode("default")
        runner.close()


@pytest.mark.parametrize("post_validation", [True, False])
def test_a_call_whose_last_step_stays_open_does_not_wait_for_the_device(corpus, tmp_path, monkeypatch, post_validation):
    plan = on_gpu(plan_of("zb-h2", 1, 1, 4, corpus, post_validation=post_validation), "nccl", "bfloat16")
    runner = Runner(plan, 0, tmp_path / "board")
    runner.connect(runner.serve("127.0.0.1", 30), 30)
    runner.restore(None)
    try:
        told = runner.run(0, 2) + runner.run(2, 1, True)
        with monkeypatch.context() as patch:
            patch.setattr(torch.cuda, "synchronize", None)
            torch.cuda.set_sync_debug_mode("error")
            told += runner.run(3, 2, True) + runner.run(5, 1, True)
            torch.cuda.set_sync_debug_mode("default")
        told += runner.run(6, 0)
    finally:
        torch.cuda.set_sync_debug_mode("default")
        runner.close()
    assert [result.step for result in told] == [0, 1, 2, 3, 4, 5]


def test_steps_that_run_on_lie_in_order_on_the_hosts_clock(corpus, tmp_path):
    plan = on_gpu(plan_of("zb-h2", 1, 1, 4, corpus), "nccl", "bfloat16")
    runner = Runner(plan, 0, tmp_path / "board")
    runner.connect(runner.serve("127.0.0.1", 30), 30)
    runner.restore(None)
    try:
        runner.run(0, 2)
        began = time.monotonic()
        told = [result for step in range(2, 12) for result in runner.run(step, 1, True)] + runner.run(12, 0)
        ended = time.monotonic()
    finally:
        runner.close()
    spans = [sorted((s.start, s.end) for s in result.spans if s.lane == "compute") for result in told]
    late = 1e-3  # what the host may hear of an event after it
    assert began - late < spans[0][0][0] and spans[-1][-1][1] < ended + late
    for before, after in pairwise(spans):
        assert before[-1][1] < after[0][0] + late
    assert all(a[1] <= b[0] + 1e-6 for step in spans for a, b in pairwise(step))
