"""Laws 1 and 4 on GPUs: every schedule and transport against one process, and twice with the same bits."""

from __future__ import annotations

import pytest
from bits import same_bits
from fleet import Fleet, losses_of
from gpus import RANKS_A_GPU, on_gpu, two_gpus
from plans import STEPS, is_close, plan_of, reference

from pentad.schedules.spec.schedule_spec import MemoryOptions

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(90 * RANKS_A_GPU), two_gpus]
SCHEDULES = [("gpipe", 3), ("1f1b", 5), ("seq-1f1b", 3), ("zb-h1", 8), ("zb-h2", 8), ("zb-v", 8), ("dualpipe", 8)]
OTHERS = [("interleaved", 4), ("interleaved-zb", 4), ("zb-2p", 5), ("v-half", 6), ("v-min", 6), ("dualpipev", 5)]
CASES = [
    *((name, dp, pp, m) for name, m in SCHEDULES for dp, pp in ((2, 2), (1, 4))),
    *((name, 1, 2, m) for name, m in SCHEDULES + OTHERS),
]


@pytest.mark.sampled(7)
@pytest.mark.parametrize("transport", ["peer", "nccl"])
@pytest.mark.parametrize(("name", "dp", "pp", "microbatches"), CASES)
def test_schedule_equals_one_process(gpus, corpus, name, dp, pp, microbatches, transport):
    plan = on_gpu(plan_of(name, dp, pp, microbatches, corpus), transport, "float64")
    losses, gradients, norms, weights = reference(plan)
    outcomes = gpus.run(plan, [(0, 2), (2, 1)])
    for step in range(STEPS):
        sums = losses_of(outcomes, step).values()
        assert sum(sums) / plan.batch.tokens == pytest.approx(losses[step], rel=1e-10)
        assert {name for outcome in outcomes for name in outcome.gradients[step]} == set(weights)
        for outcome in outcomes:
            assert outcome.results[step].grad_norm == pytest.approx(norms[step], rel=1e-10)
            for parameter, gradient in outcome.gradients[step].items():
                assert is_close(gradient, gradients[step][parameter]), f"step {step}: gradient of {parameter}"
    assert {f"model.{name}" for name in weights} <= {name for outcome in outcomes for name in outcome.state}
    for outcome in outcomes:
        for parameter in (n for n in weights if f"model.{n}" in outcome.state):
            assert is_close(outcome.state[f"model.{parameter}"], weights[parameter]), parameter


@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-10), ("bfloat16", 3e-2)])
@pytest.mark.parametrize("zero", [0, 1, 3])
def test_mirror_ranks_reduce_in_the_first_step_of_new_processes(corpus, zero, dtype, tolerance):
    """NCCL's first operation, or a kernel's first launch, must not block a host before it has granted what its
    neighbour sends: that would be a deadlock."""
    options = MemoryOptions(zero=zero)
    plan = on_gpu(plan_of("dualpipe", 1, 2, 8, corpus, memory_options=options), "peer", dtype, options)
    fleet = Fleet(2)
    try:
        outcomes = fleet.run(plan, [(0, 1)])
    finally:
        fleet.stop()
    sums = losses_of(outcomes).values()
    assert sum(sums) / plan.batch.tokens == pytest.approx(reference(plan)[0][0], rel=tolerance)


@pytest.mark.sampled(7)
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("bfloat16", 3e-2)])
@pytest.mark.parametrize(("name", "dp", "pp", "microbatches"), [case for case in CASES if case[1] == 1])
def test_triton_kernels_train_like_the_reference(gpus, corpus, name, dp, pp, microbatches, dtype, tolerance):
    plan = on_gpu(plan_of(name, dp, pp, microbatches, corpus), "peer", dtype)
    losses, gradients, _, _ = reference(plan)
    first, second = gpus.run(plan, [(0, 3)]), gpus.run(plan, [(0, 1), (1, 2)])
    sums = losses_of(first).values()
    assert sum(sums) / plan.batch.tokens == pytest.approx(losses[0], rel=tolerance)
    for outcome in first:
        for parameter, gradient in outcome.gradients[0].items():
            assert is_close(gradient.double(), gradients[0][parameter], tolerance), parameter
    for a, b in zip(first, second, strict=True):
        assert [r.losses for r in a.results] == [r.losses for r in b.results]
        assert same_bits(a.state, b.state)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("transport", ["peer", "nccl"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("clip", [1e6, 0.5, 0.01], ids=["never clipped", "sometimes", "always"])
@pytest.mark.parametrize(
    ("name", "dp", "pp", "microbatches"), [("zb-h2", 1, 2, 6), ("zb-h2", 1, 4, 8), ("zb-v", 1, 2, 6)]
)
def test_an_optimistic_step_has_the_bits_of_one_with_a_barrier(
    gpus, corpus, name, dp, pp, microbatches, clip, dtype, transport
):
    runs = []
    for post_validation in (True, False):
        plan = plan_of(name, dp, pp, microbatches, corpus, clip=clip, post_validation=post_validation)
        runs.append(gpus.run(on_gpu(plan, transport, dtype), [(0, 4), (4, 1)]))
    for optimistic, barrier in zip(*runs, strict=True):
        assert [r.losses for r in optimistic.results] == [r.losses for r in barrier.results]
        norms = [r.grad_norm for r in barrier.results]
        assert [r.grad_norm for r in optimistic.results] == pytest.approx(norms, rel=1e-12)
        assert same_bits(optimistic.state, barrier.state)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("transport", ["peer", "nccl"])
@pytest.mark.parametrize(
    ("name", "dp", "pp", "microbatches", "post_validation"),
    [("zb-h2", 1, 2, 6, True), ("zb-h2", 1, 2, 6, False), ("zb-h2", 2, 2, 4, True), ("dualpipe", 1, 4, 8, True)],
)
def test_split_calls_equal_one_call(gpus, corpus, name, dp, pp, microbatches, post_validation, transport):
    plan = on_gpu(plan_of(name, dp, pp, microbatches, corpus, post_validation=post_validation), transport, "bfloat16")
    expected = gpus.run(plan, [(0, 6)])
    for calls in ([*((step, 1, True) for step in range(6)), (6, 0)], [(0, 2, True), (2, 0), (2, 3, True), (5, 1)]):
        for a, b in zip(gpus.run(plan, calls), expected, strict=True):
            assert [r.step for r in a.results] == list(range(6))
            assert [(r.losses, r.grad_norm) for r in a.results] == [(r.losses, r.grad_norm) for r in b.results]
            assert same_bits(a.state, b.state)
