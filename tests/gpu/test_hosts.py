"""Laws 1 and 4 on GPUs of two simulated hosts: copy engines inside a host, NCCL between them."""

from __future__ import annotations

from typing import Any

import pytest
from bits import same_bits
from exactness import assert_equals_one_process
from gpus import RANKS_A_GPU, on_gpu, two_gpus
from plans import plan_on_mesh
from small_models import HEADS, MOE, WIDE, WIDE_MOE

from pentad.schedules.spec.mesh import ORDER, hosts_of_size
from pentad.schedules.spec.plan import Plan
from pentad.schedules.spec.schedule_spec import MemoryOptions

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120 * RANKS_A_GPU), two_gpus]
UNITS = {"unit_layers": 2}
ZERO_OVER_STAGES = (0, 0, 1, 1)  # replicas of a stage on one host: ranks of a stage are adjacent


def plan_on_hosts(
    corpus: str, name: str, sizes: dict[str, int], hosts: tuple[int, ...] | None, dtype: str, more: dict[str, Any]
) -> Plan:
    plan, options = plan_on_mesh(corpus, name, sizes, **more), more.get("memory_options", MemoryOptions())
    hosts = hosts or hosts_of_size(plan.mesh, plan.mesh.size // 2)
    return on_gpu(plan, "peer", dtype, options, hosts=hosts)


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("name", "sizes", "copied", "hosts", "more"),
    [
        ("1f1b", {"pp": 2}, "", None, {}),
        ("1f1b", {"dp": 2}, "", None, {"memory_options": MemoryOptions(zero=3)}),
        *(("1f1b", {"dp": 2, "tp": 2}, "tp", None, {"memory_options": MemoryOptions(zero=zero)}) for zero in (0, 1, 3)),
        ("zb-h2", {"pp": 2, "tp": 2}, "tp", None, {}),
        ("zb-h2", {"dp": 2, "pp": 2}, "pp", None, {}),
        ("1f1b", {"dp": 2, "cp": 2}, "cp", None, {"model": HEADS}),
        ("1f1b", {"pp": 2, "cp": 2}, "cp dp", None, {"model": HEADS, "memory_options": MemoryOptions(zero=3)}),
        ("1f1b", {"dp": 2, "ep": 2}, "ep", None, {"model": MOE}),
        ("dualpipe", {"pp": 2, "ep": 2}, "ep", None, {"model": MOE}),
        *(
            ("1f1b", {"dp": 2, "pp": 2}, "dp", ZERO_OVER_STAGES, {"memory_options": MemoryOptions(zero=zero)})
            for zero in (1, 2, 3)
        ),
        *(
            ("1f1b", {"dp": 4}, "dp", None, {"memory_options": MemoryOptions(zero=zero), "zero_shards": 2, **UNITS})
            for zero in (1, 2, 3)
        ),
    ],
)
def test_two_hosts_equal_one_process(gpus, corpus, name, sizes, copied, hosts, more):
    plan = plan_on_hosts(corpus, name, sizes, hosts, "float64", more)
    used = [axis for axis in ORDER if getattr(plan.mesh, axis) > 1 or (axis == "dp" and plan.zero)]
    assert {axis for axis in used if plan.transport_along(axis) == "peer"} == set(copied.split())
    assert_equals_one_process(gpus, plan)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("name", "sizes", "more"),
    [
        ("1f1b", {"dp": 2, "tp": 2}, {"model": WIDE}),
        ("1f1b", {"dp": 2, "tp": 2}, {"model": WIDE, "memory_options": MemoryOptions(zero=3)}),
        ("zb-h2", {"pp": 2, "tp": 2}, {"model": WIDE}),
        ("1f1b", {"pp": 2, "ep": 2}, {"model": WIDE_MOE, "memory_options": MemoryOptions(zero=1)}),
    ],
)
def test_repeated_runs_are_bit_identical(gpus, corpus, name, sizes, more):
    plan = plan_on_hosts(corpus, name, sizes, None, "bfloat16", more)
    first, second = gpus.run(plan, [(0, 3)]), gpus.run(plan, [(0, 1), (1, 2)])
    for a, b in zip(first, second, strict=True):
        assert [(r.losses, r.grad_norm) for r in a.results] == [(r.losses, r.grad_norm) for r in b.results]
        assert same_bits(a.state, b.state)
