"""Muon, bfloat16 state and the z-loss on GPUs: one process's weights in float64, the same bits twice in bfloat16."""

from __future__ import annotations

from dataclasses import replace

import pytest
from bits import same_bits
from exactness import assert_equals_one_process
from gpus import RANKS_A_GPU, on_gpu, two_gpus
from plans import MODEL, plan_of, plan_on_mesh
from small_models import HEADS, MOE, WIDE, WIDE_MOE

from pentad.schedules.spec.schedule_spec import MemoryOptions

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120 * RANKS_A_GPU)]
CASES = [
    ("gpipe", {}, 0, MODEL),
    pytest.param("zb-h2", {"tp": 2, "pp": 2}, 0, HEADS, marks=two_gpus),
    pytest.param("1f1b", {"tp": 2, "dp": 2}, 3, HEADS, marks=two_gpus),
    pytest.param("1f1b", {"ep": 2}, 1, MOE, marks=two_gpus),
]
REPEATED = [
    ("gpipe", {}, 0, WIDE),
    pytest.param("1f1b", {"tp": 2}, 0, WIDE, marks=two_gpus),
    pytest.param("1f1b", {"ep": 2}, 1, WIDE_MOE, marks=two_gpus),
]


@pytest.mark.parametrize(("name", "sizes", "zero", "model"), CASES)
def test_muon_gives_the_weights_of_one_process(gpus, corpus, name, sizes, zero, model):
    options = MemoryOptions(zero=zero)
    plan = on_gpu(plan_on_mesh(corpus, name, sizes, model=model, memory_options=options), "peer", "float64", options)
    muon = replace(plan.optimizer, name="muon", z_loss=0.1)
    assert_equals_one_process(gpus, replace(plan, zero=zero, optimizer=muon))


@two_gpus
@pytest.mark.parametrize("name", ["zb-h2", "1f1b"])
def test_a_step_before_its_norm_has_the_directions_of_its_own_gradients(gpus, corpus, name):
    """With post-validation NORM makes them on a lane of its own, and STEP waits for no other rank."""
    plan = on_gpu(plan_of(name, 1, 2, 4, corpus, post_validation=True), "peer", "float64")
    assert_equals_one_process(gpus, replace(plan, optimizer=replace(plan.optimizer, name="muon")))


@pytest.mark.parametrize(("name", "sizes", "zero", "model"), REPEATED)
def test_muon_repeats_its_bits_and_stays_near_float64(gpus, corpus, name, sizes, zero, model):
    """With Newton-Schulz and momentum in bfloat16."""
    options = MemoryOptions(zero=zero)
    plan = on_gpu(plan_on_mesh(corpus, name, sizes, model=model, memory_options=options), "peer", "bfloat16", options)
    plan = replace(plan, optimizer=replace(plan.optimizer, name="muon", bf16_state=True))
    one, two = gpus.run(plan, [(0, 4)]), gpus.run(plan, [(0, 1), (1, 3)])
    assert all(same_bits(first.state, second.state) for first, second in zip(one, two, strict=True))
    wide = replace(plan, dtype="float64", optimizer=replace(plan.optimizer, bf16_state=False))
    for outcome, expected in zip(one, gpus.run(wide, [(0, 4)]), strict=True):
        for found, exact in zip(outcome.results, expected.results, strict=True):
            assert found.losses == pytest.approx(exact.losses, rel=3e-2)
