"""On GPUs a spike is found without the host: it has the bits of a step that never counted."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from bits import same_bits
from fleet import BadGradient, Call
from gpus import RANKS_A_GPU, on_gpu, two_gpus
from plans import plan_of

from pentad.schedules.spec.optimizer import SpikeSpec

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(90 * RANKS_A_GPU), two_gpus]
SPIKES = SpikeSpec(threshold=50.0, window=4, min_steps=3)
SPIKE = BadGradient(rank=0, step=4, value=1e3)


@pytest.mark.parametrize("post_validation", [False, True])
@pytest.mark.parametrize(("name", "dp", "pp", "microbatches"), [("1f1b", 2, 1, 2), ("zb-h2", 1, 2, 4)])
def test_a_spike_has_the_bits_of_a_step_that_never_counted(gpus, corpus, name, dp, pp, microbatches, post_validation):
    made = plan_of(name, dp, pp, microbatches, corpus, post_validation=post_validation)
    plan = on_gpu(made, dtype="float32")
    calls: list[Call] = [(0, 3), (3, 4)]
    found = gpus.run(replace(plan, spikes=SPIKES), calls, bad_gradient=SPIKE)
    never = gpus.run(plan, calls, bad_gradient=SPIKE._replace(value=math.inf))
    assert [result.skipped for result in found[0].results] == [step == SPIKE.step for step in range(7)]
    for one, other in zip(found, never, strict=True):
        assert same_bits(one.state, other.state)
        assert [result.losses for result in one.results] == [result.losses for result in other.results]
