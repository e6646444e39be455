"""Squares of gradients may be added up stage by stage, once each is reduced, to the bits of the end of a step."""

import pytest
import torch
from plans import SHALLOW, plan_of
from small_models import MOE

from pentad.workers.runtime.runner import Runner


@pytest.mark.parametrize("model", [SHALLOW, MOE], ids=["dense", "experts"])
def test_squares_of_stages_are_those_of_the_end_of_the_step(corpus, tmp_path, model):
    plan = plan_of("interleaved", 1, 1, 2, corpus, chunks=2, model=model)
    runner = Runner(plan, 0, tmp_path / "progress")
    runner.connect(runner.serve("127.0.0.1", 30.0), 30.0)
    runner.restore(None)
    runner.run(0, 1)
    assert runner.executor is not None
    totals = runner.executor.optimizer_step.totals
    expected, counts = totals.fill().clone(), totals.own_counts

    totals.sum_squares(0)
    assert not totals.summed, "a CPU adds up at the end"
    totals.sums_beside_backward = True
    for number in totals.stages:
        totals.sum_squares(number)
    assert totals.summed == {*plan.param_shards}
    for stage in totals.stages.values():
        for buffers in stage.param_buffers:
            buffers.parameters.gradient.add_(1)
    assert torch.equal(totals.fill(), expected)

    totals.begin(counts)
    assert not torch.equal(totals.fill(), expected), "the next step has gradients of its own"
    runner.close()
