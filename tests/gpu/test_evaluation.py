"""Evaluations on GPUs: the losses of one process, the bits of a run without them, and a host that waits for nothing."""

from __future__ import annotations

import pytest
import torch
from bits import assert_same_runs
from evaluations import EVALUATED, assert_evaluates_like_one_process, losses_of, with_eval
from gpus import RANKS_A_GPU, on_gpu, two_gpus
from plans import STEPS, plan_of
from small_models import MOE

from pentad.schedules.spec.schedule_spec import MemoryOptions
from pentad.workers.runtime.runner import Runner

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120 * RANKS_A_GPU)]


@pytest.mark.sampled(3)
@two_gpus
@pytest.mark.parametrize("transport", ["peer", "nccl"])
@pytest.mark.parametrize("name", ["zb-h2", "dualpipe", "zb-v", "interleaved"])
def test_evaluations_have_the_losses_of_one_process(gpus, corpus, name, transport):
    plan = on_gpu(plan_of(name, 1, 2, 4, corpus, "float64", model=MOE), transport)
    evaluated = assert_evaluates_like_one_process(gpus, with_eval(plan, 21))
    assert_same_runs(evaluated, gpus.run(plan, [(0, 2), (2, STEPS - 2)]))


@pytest.mark.sampled(3)
@two_gpus
@pytest.mark.parametrize("zero", [1, 3])
@pytest.mark.parametrize("post_validation", [False, True])
def test_a_run_has_the_same_bits_with_evaluations_and_without(gpus, corpus, zero, post_validation):
    options = MemoryOptions(zero=zero)
    given = {"post_validation": post_validation, "memory_options": options}
    plan = on_gpu(plan_of("1f1b", 2, 1, 3, corpus, "bfloat16", **given), "peer", None, options)
    evaluated, again = (gpus.run(with_eval(plan, 21), EVALUATED) for _ in range(2))
    assert_same_runs(evaluated, gpus.run(plan, [(0, 2), (2, STEPS - 2)]))
    assert list(map(losses_of, evaluated)) == list(map(losses_of, again))


def test_no_round_waits_for_the_device(corpus, tmp_path):
    plan = with_eval(on_gpu(plan_of("zb-h2", 1, 1, 4, corpus), "nccl", "bfloat16"), 21)
    runner = Runner(plan, 0, tmp_path / "progress")
    runner.connect(runner.serve("127.0.0.1", 30), 30)
    runner.restore(None)
    try:
        first = runner.evaluate(0)
        assert runner.executor is not None and runner.eval_loader is not None
        runner.executor.losses.clear()
        torch.cuda.set_sync_debug_mode("error")
        for number, at in enumerate(runner.eval_loader.rounds):
            runner.executor.evaluate(runner.programs[1], 0, number, at.data_set, runner.eval_loader(at))
        torch.cuda.set_sync_debug_mode("default")
        runner.executor.lanes.read_times(lambda: None)
        assert runner.executor.losses.read() == [(each.loss_sum, each.tokens) for each in first.data_sets]
    finally:
        torch.cuda.set_sync_debug_mode("default")
        runner.close()
