"""Documents on random groups of GPUs: one process's numbers, and the same bits twice."""

from __future__ import annotations

from typing import Any

import pytest
from bits import same_bits
from exactness import assert_equals_one_process
from gpus import RANKS_A_GPU, num_places, on_gpu, two_gpus
from group_reference import reference_of_groups
from plans import STEPS
from random_groups import RandomGroupsFleet, grouped_plan, random_groups
from small_models import FAMILIES, MOE, WIDE

from pentad.schedules.spec.schedule_spec import MemoryOptions

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120 * RANKS_A_GPU), two_gpus]
CASES: list[dict[str, Any]] = [
    {"sizes": {"dp": 2}},
    {"sizes": {"cp": 2}, "model": FAMILIES["gemma2"]},
    {"sizes": {"dp": 2}, "memory_options": MemoryOptions(zero=3)},
    {"sizes": {"dp": 4}},
    {"sizes": {"dp": 2, "cp": 2}, "model": FAMILIES["gpt-oss"]},
    {"sizes": {"pp": 2, "dp": 2}, "microbatches": 4},
    {"sizes": {"tp": 2, "cp": 2}},
]


@pytest.fixture(scope="module")
def random_gpus():
    fleet = RandomGroupsFleet(min(4, num_places()))
    yield fleet
    fleet.stop()


def plan_of_case(tmp_path, case, dtype, transport="peer"):
    given = {"microbatches": 3, "factor": 4, **case}
    plan = grouped_plan(tmp_path, **given)
    if plan.mesh.size > num_places():
        pytest.skip(f"{plan.mesh.size} GPUs are needed")
    return on_gpu(plan, transport, dtype, memory_options=given.get("memory_options", MemoryOptions()))


@pytest.mark.sampled(5)
@pytest.mark.parametrize("transport", ["peer", "nccl"])
@pytest.mark.parametrize("case", CASES)
def test_groups_of_gpus_equal_one_process(random_gpus, tmp_path, case, transport):
    assert_equals_one_process(random_gpus, plan_of_case(tmp_path, case, "float64", transport), steps=STEPS)


@pytest.mark.parametrize("sizes", [{"dp": 2}, {"ep": 2}])
def test_groups_of_gpus_balance_experts_like_one_process(random_gpus, tmp_path, sizes):
    plan = plan_of_case(tmp_path, {"sizes": sizes, "model": MOE}, "float64")
    assert_equals_one_process(random_gpus, plan, reference_of_groups(plan, random_groups))


@pytest.mark.parametrize("sizes", [{"dp": 2}, {"dp": 2, "cp": 2}, {"pp": 2, "dp": 2}])
def test_groups_of_gpus_give_the_same_bits_twice(random_gpus, tmp_path, sizes):
    plan = plan_of_case(tmp_path, {"sizes": sizes, "model": WIDE}, "bfloat16")
    once, again = (random_gpus.run(plan, [(0, 3)]) for _ in range(2))
    for a, b in zip(once, again, strict=True):
        assert same_bits(a.state, b.state)
        assert [r.losses for r in a.results] == [r.losses for r in b.results]
