"""Laws 1 and 4 on GPUs for custom models: equal to one process, and reproducible to the bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from custom_models import custom_model, reference
from fleet import Fleet, assemble, losses_of
from gpus import RANKS_A_GPU, two_gpus
from plans import STEPS, is_close, plan_of

from pentad.schedules.spec.plan import Plan

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(90 * RANKS_A_GPU), two_gpus]


@pytest.fixture(scope="module")
def gpus():
    fleet = Fleet(2)
    yield fleet
    fleet.stop()


def on_gpu(plan: Plan, dtype: str) -> Plan:
    return replace(plan, device="cuda", transport="peer", dtype=dtype)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("name", "dp", "pp", "microbatches"), [("zb-h1", 1, 2, 4), ("zb-v", 1, 2, 4), ("1f1b", 2, 1, 2)]
)
@pytest.mark.parametrize("model", ["gpt", "conv"])
def test_any_schedule_equals_one_process(gpus, corpus, tmp_path, model, name, dp, pp, microbatches) -> None:
    plan = plan_of(name, dp, pp, microbatches, corpus, model=custom_model(tmp_path, model))
    losses, gradients, _, weights = reference(plan)
    outcomes = gpus.run(on_gpu(plan, dtype="float64"), [(0, STEPS)])
    for step in range(STEPS):
        sums = losses_of(outcomes, step).values()
        assert sum(sums) / plan.batch.tokens == pytest.approx(losses[step], rel=1e-10)
        found = assemble([outcome.gradients[step] for outcome in outcomes], weights)
        assert all(is_close(found[name], gradients[step][name]) for name in weights)


def test_two_runs_with_dropout_have_the_same_bits(gpus, corpus, tmp_path) -> None:
    plan = on_gpu(plan_of("zb-h1", 1, 2, 4, corpus, model=custom_model(tmp_path, "gpt_dropout")), dtype="bfloat16")
    one, two = (gpus.run(plan, [(0, STEPS)]) for _ in range(2))
    for first, second in zip(one, two, strict=True):
        assert all(torch.equal(value, second.state[name]) for name, value in first.state.items())
