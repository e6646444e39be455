"""A step that is a spike changes nothing, on any mesh, to the bit, also in runs that were resumed or repaired."""

from __future__ import annotations

import math
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from bits import same_bits
from fleet import BadGradient, Call, Fleet
from plans import SHALLOW, plan_of
from resume import run_and_save
from small_models import MOE
from worker_processes import call_all, losses_and_state, recover, start_run

from pentad.schedules.spec.optimizer import SpikeSpec
from pentad.schedules.spec.plan import Plan
from pentad.schedules.spec.schedule_spec import MemoryOptions
from pentad.workers.checkpoint import checkpoint

slow = pytest.mark.slow
SPIKES = SpikeSpec(threshold=50.0, window=4, min_steps=3)
SPIKE_STEP = 4
SQUARE: dict[str, Any] = {"dp": 2, "pp": 2, "microbatches": 4}
PIPELINE: dict[str, Any] = {"pp": 4, "microbatches": 8}
CASES = [
    ("1f1b", {"pp": 2, "microbatches": 4}),
    pytest.param("1f1b", SQUARE, marks=slow),
    ("zb-h2", {"pp": 2, "microbatches": 4, "post_validation": True}),
    pytest.param("1f1b", {"dp": 1, "microbatches": 6}, marks=slow),
    pytest.param("dualpipe", PIPELINE, marks=slow),
    pytest.param("dualpipe", {**PIPELINE, "post_validation": True}, marks=slow),
    pytest.param(
        "interleaved", {"dp": 2, "pp": 2, "microbatches": 4, "memory_options": MemoryOptions(zero=3)}, marks=slow
    ),
    pytest.param("1f1b", {"tp": 2, "pp": 2, "microbatches": 4}, marks=slow),
    pytest.param("zb-v", {"cp": 2, "pp": 2, "microbatches": 4}, marks=slow),
    pytest.param("1f1b", {"dp": 2, "ep": 2, "microbatches": 2, "model": MOE}, marks=slow),
]


def make_plan(name: str, corpus: str, axes: dict[str, Any], spikes: SpikeSpec | None = SPIKES) -> Plan:
    given = {"name": name, "dp": 1, "pp": 1, "data": corpus, "dtype": "float32", "model": SHALLOW}
    plan = plan_of(**{**given, **axes})
    return replace(plan, spikes=spikes)


def bits(outcomes: list) -> list:
    """Losses, norms and states of a fleet's run."""
    return [([(r.losses, r.grad_norm, r.skipped) for r in each.results], each.state) for each in outcomes]


def assert_same(found: list, expected: list) -> None:
    for (results, state), (expected_results, expected_state) in zip(found, expected, strict=True):
        assert results == expected_results
        assert same_bits(state, expected_state)


@slow
@pytest.mark.parametrize(("name", "axes"), CASES)
def test_without_a_spike_the_bits_are_those_without_the_policy(fleet: Fleet, corpus: str, name, axes) -> None:
    with_policy, without = (fleet.run(make_plan(name, corpus, axes, spikes), [(0, 5)]) for spikes in (SPIKES, None))
    assert_same(bits(with_policy), bits(without))


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("name", "axes"), CASES)
def test_a_spike_has_the_bits_of_a_step_that_never_counted(
    fleet: Fleet, corpus: str, tmp_path: Path, name, axes
) -> None:
    """The reference is a step with an infinite norm; the spike is also met after a resume from just before it."""
    calls: list[Call] = [(0, 2), (2, SPIKE_STEP), (SPIKE_STEP + 2, 2)]
    spike = BadGradient(rank=0, step=SPIKE_STEP, value=1e3)
    plan, reference = (make_plan(name, corpus, axes, spikes) for spikes in (SPIKES, None))
    found = fleet.run(plan, calls, bad_gradient=spike)
    assert [r.skipped for r in found[0].results] == [step == SPIKE_STEP for step in range(8)]
    assert 100 < found[0].results[SPIKE_STEP].grad_norm < math.inf
    never = fleet.run(reference, calls, bad_gradient=spike._replace(value=math.inf))
    for one, other in zip(found, never, strict=True):
        assert same_bits(one.state, other.state)
        assert [r.losses for r in one.results] == [r.losses for r in other.results]

    folder = checkpoint.folder_of(tmp_path, 3)
    run_and_save(fleet, plan, 3, folder)
    resumed = fleet.run(plan, [(3, 5)], restore=str(folder), bad_gradient=spike._replace(step=SPIKE_STEP - 3))
    for one, other in zip(resumed, found, strict=True):
        assert same_bits(one.state, other.state)
        assert [(r.losses, r.skipped) for r in one.results] == [(r.losses, r.skipped) for r in other.results[3:]]


@slow
@pytest.mark.parametrize("resumes", [False, True])
def test_without_its_window_a_resumed_run_would_take_the_spike(
    fleet: Fleet, corpus: str, tmp_path: Path, resumes: bool
) -> None:
    """The tests of resumed runs rely on this: a window that starts over has too few steps."""
    plan = make_plan("1f1b", corpus, {"pp": 2, "microbatches": 2})
    folder = checkpoint.folder_of(tmp_path, 3)
    run_and_save(fleet, plan if resumes else replace(plan, spikes=None), 3, folder)
    spike = BadGradient(rank=0, step=1, value=1e3)
    found = fleet.run(plan, [(3, 2)], restore=str(folder), bad_gradient=spike)
    assert [r.skipped for r in found[0].results] == [False, resumes]


@slow
@pytest.mark.timeout(150)
@pytest.mark.parametrize(
    ("name", "axes"),
    [
        ("1f1b", {"dp": 2, "pp": 2, "microbatches": 4}),
        ("dualpipe", {"pp": 4, "microbatches": 8}),
        ("1f1b", {"dp": 4, "pp": 1, "microbatches": 2, "zero_shards": 2, "memory_options": MemoryOptions(zero=2)}),
    ],
)
def test_a_repaired_rank_has_the_window_of_the_others(workers, corpus: str, name, axes) -> None:
    """With a threshold so low that half of all steps are spikes, every later decision depends on all earlier ones."""
    plan = make_plan(name, corpus, axes, SpikeSpec(threshold=0.3, window=4, min_steps=2))
    steps = 16
    start_run(workers, plan)
    undisturbed = call_all(workers, "run", 0, steps)
    assert 3 < sum(result.skipped for result in undisturbed[0]) < 14
    expected = losses_and_state(workers, undisturbed, 0)
    call_all(workers, "close")

    start_run(workers, plan)
    for worker in workers:
        worker.call("run", 0, 80)
    workers[1].wait_for_step(6)
    workers[1].signal(signal.SIGKILL)
    version, _ = recover(workers, [1], plan, 2)
    results = call_all(workers, "run", version, steps - version)
    found = losses_and_state(workers, results, version)
    assert same_bits(found[1], expected[1])
    assert found[0] == {step: expected[0][step] for step in range(version, steps)}
    call_all(workers, "close")
