"""Law 1 on simulated hosts, mostly two of two ranks each: copies inside a host, process groups between them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from bits import same_bits
from exactness import assert_equals_one_process
from plans import MODEL, plan_on_mesh
from small_models import FAMILIES, HEADS, MOE
from worker_processes import call_all, start_run

from pentad.schedules.spec.mesh import ORDER, hosts_of_size
from pentad.schedules.spec.schedule_spec import MemoryOptions

pytestmark = pytest.mark.timeout(120)
slow = pytest.mark.slow
ZERO_OVER_STAGES = (0, 0, 1, 1)  # replicas of a stage on one host: ranks of a stage are adjacent


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("name", "sizes", "copied", "hosts", "more"),
    [
        ("1f1b", {"dp": 2, "tp": 2}, "tp", None, {}),
        *(
            pytest.param(
                "1f1b", {"dp": 2, "tp": 2}, "tp", None, {"memory_options": MemoryOptions(zero=zero)}, marks=slow
            )
            for zero in (1, 2, 3)
        ),
        ("zb-h2", {"pp": 2, "tp": 2}, "tp", None, {}),
        ("1f1b", {"dp": 2, "cp": 2}, "cp", None, {"model": HEADS}),
        pytest.param("1f1b", {"pp": 2, "cp": 2}, "cp", None, {"model": HEADS, "cp_method": "ulysses"}, marks=slow),
        pytest.param("1f1b", {"dp": 2, "cp": 2}, "cp", None, {"model": HEADS, "cp_method": "all_gather"}, marks=slow),
        ("1f1b", {"dp": 2, "ep": 2}, "ep", None, {"model": MOE}),
        pytest.param("dualpipe", {"pp": 2, "ep": 2}, "ep", None, {"model": MOE}, marks=slow),
        *(
            pytest.param(
                "1f1b", {"dp": 2, "pp": 2}, "dp", ZERO_OVER_STAGES, {"memory_options": MemoryOptions(zero=zero)}
            )
            for zero in (1, 2, 3)
        ),
        pytest.param(
            "1f1b", {"pp": 2, "cp": 2}, "cp dp", None, {"model": HEADS, "memory_options": MemoryOptions(zero=3)}
        ),
        pytest.param("1f1b", {"tp": 4}, "", (0, 0, 1, 1), {"model": HEADS}, marks=slow),
        ("1f1b", {"tp": 4}, "tp", (0, 0, 0, 0), {"model": HEADS}),
        ("1f1b", {"dp": 2, "tp": 2}, "tp", None, {"model": FAMILIES["deepseek-v3"]}),
        pytest.param("1f1b", {"ep": 2, "tp": 2}, "tp ep", (0, 0, 0, 0), {"model": FAMILIES["deepseek-v3"]}, marks=slow),
    ],
)
def test_two_hosts_equal_one_process(fleet, corpus, name, sizes, copied, hosts, more: dict[str, Any]):
    plan = plan_on_mesh(corpus, name, sizes, **{**more, "model": replace(more.get("model", MODEL), layers=4)})
    plan = replace(plan, transport="peer", hosts=hosts or hosts_of_size(plan.mesh, 2))
    used = [axis for axis in ORDER if getattr(plan.mesh, axis) > 1 or (axis == "dp" and plan.zero)]
    assert {axis for axis in used if plan.transport_along(axis) == "peer"} == set(copied.split())
    assert_equals_one_process(fleet, plan)


@pytest.mark.parametrize("optimizer", ["adamw", pytest.param("muon", marks=slow)])
def test_a_step_with_a_rank_whose_waits_were_ended_is_committed_by_none(workers, corpus, optimizer):
    """The flags of its host are released at once, and what ranks there then send to other hosts may be wrong."""
    plan = plan_on_mesh(corpus, "1f1b", {"dp": 2}, dtype="float32")
    plan, ranks = replace(plan, optimizer=replace(plan.optimizer, name=optimizer)), workers[:2]
    start_run(ranks, plan)
    call_all(ranks, "run", 0, 2)
    before = call_all(ranks, "state")
    ranks[1].answer(ranks[1].call_now("cancel"))
    call_all(ranks, "run", 2, 2)
    assert call_all(ranks, "version") == [2, 2]
    assert all(same_bits(*states) for states in zip(call_all(ranks, "state"), before, strict=True))
    call_all(ranks, "close")
