"""On a GPU the host only issues: nothing in a step waits for the device."""

from __future__ import annotations

import pytest
import torch
from plans import plan_of
from test_gpu_training import on_gpu

from pentad.workers.runner import Runner

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
