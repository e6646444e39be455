"""Optimizer state in host memory: the bits of state on the device, one process's result, checkpoints."""

from __future__ import annotations

from typing import Any

import pytest
from bits import same_bits
from exactness import assert_equals_one_process
from plans import STEPS, plan_of
from resume import save_and_resume
from small_models import FAMILIES, MOE

from pentad.orchestrator.planning.estimate import memory
from pentad.schedules.spec.schedule_spec import MemoryOptions
from pentad.workers.checkpoint import checkpoint

pytestmark = pytest.mark.timeout(60)
slow = pytest.mark.slow
CASES = [
    pytest.param("zb-h2", 2, {"unit_layers": 1, "offload": 0.5}),
    *(
        pytest.param(name, zero, {"model": model, **more}, marks=slow)
        for name, more in (("1f1b", {}), ("dualpipe", {"unit_layers": 1}), ("looped-bfs", {"chunks": 2}))
        for zero in (0, 1, 2, 3)
        for model in (MOE, FAMILIES["qwen3"])
    ),
]


@pytest.mark.parametrize(("name", "zero", "more"), CASES)
def test_state_on_the_host_equals_one_process(fleet, corpus, name, zero, more) -> None:
    options = MemoryOptions(zero=zero)
    plan = plan_of(name, 2, 2, 4, corpus, memory_options=options, host_optimizer=True, **more)
    assert_equals_one_process(fleet, plan)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("zero", "dtype"), [(1, "bfloat16"), *(pytest.param(z, "float32", marks=slow) for z in range(4))]
)
def test_state_on_the_host_has_the_bits_of_state_on_the_device(fleet, corpus, zero, dtype) -> None:
    runs: list[Any] = []
    for host_optimizer in (False, True):
        given: dict[str, Any] = {"memory_options": MemoryOptions(zero=zero), "host_optimizer": host_optimizer}
        plan = plan_of("1f1b", 2, 2, 4, corpus, dtype, **given)
        runs.append(fleet.run(plan, [(0, 1), (1, STEPS - 1)]))
        for rank, outcome in enumerate(runs[-1]):
            planned = memory(plan, rank)
            kinds = {"parameters", "gradients", "host_optimizer"} if host_optimizer else outcome.bytes.keys()
            assert {kind: outcome.bytes[kind] for kind in kinds} == {kind: planned[kind] for kind in kinds}
    for device, host in zip(*runs, strict=True):
        assert same_bits(device.state, host.state)
        assert [each.losses for each in device.results] == [each.losses for each in host.results]


@pytest.mark.slow
def test_a_checkpoint_of_either_resumes_with_the_other(fleet, corpus, tmp_path) -> None:
    given: dict[str, Any] = {"memory_options": MemoryOptions(zero=1)}
    device, host = (
        plan_of("1f1b", 2, 1, 4, corpus, "bfloat16", host_optimizer=each, **given) for each in (False, True)
    )
    expected = fleet.run(device, [(0, 4)])
    for number, (plan, before) in enumerate(((host, device), (device, host))):
        resumed = save_and_resume(
            fleet, plan, checkpoint.folder_of(tmp_path / str(number), 2), 2, [(2, 2)], before=before
        )
        for one, other in zip(expected, resumed, strict=True):
            assert same_bits(one.state, other.state)
