"""Groups over which ZeRO shards the state, and replicas of the shards."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from plans import plan_on_mesh
from small_models import MOE

from pentad.schedules.spec.plan import Plan
from pentad.schedules.spec.schedule_spec import MemoryOptions
from pentad.schedules.spec.zero_layout import replica_groups, replicas, zero_group, zero_groups, zero_layout

MESHES: list[tuple[str, dict[str, Any]]] = [
    ("1f1b", {"dp": 8}),
    ("1f1b", {"dp": 4, "pp": 2, "tp": 2}),
    ("1f1b", {"dp": 2, "cp": 2, "ep": 2, "model": MOE}),
    ("dualpipe", {"dp": 4, "pp": 2}),
]


def plan_with(name: str, sizes: dict[str, Any], shards: int, zero: int = 2) -> Plan:
    return plan_on_mesh("corpus", name, sizes, memory_options=MemoryOptions(zero=zero), zero_shards=shards)


@pytest.mark.parametrize(("name", "sizes"), MESHES)
@pytest.mark.parametrize("shards", [0, 2, 4])
def test_every_group_has_each_part_once_and_every_part_the_same_ranks(name, sizes, shards) -> None:
    plan = plan_with(name, sizes, shards)
    for shard in plan.param_shards:
        holders, groups, same = plan.holders(shard), zero_groups(plan, shard), replica_groups(plan, shard)
        assert [rank for group in groups for rank in group] == list(holders), "consecutive ranks"
        assert {len(group) for group in groups} == {shards or len(holders)} == {plan.num_zero_shards(shard)}
        for part, ranks in enumerate(same):
            for rank in ranks:
                layout = zero_layout(plan, shard, rank)
                assert (layout.shard_index, layout.num_shards) == (part, len(same))
                assert zero_group(plan, shard, rank)[part] == rank and replicas(plan, shard, rank) == ranks


def test_without_zero_all_holders_are_replicas_and_with_it_none() -> None:
    plan = plan_with("1f1b", {"dp": 4}, 0, zero=0)
    (shard,) = plan.param_shards
    assert zero_groups(plan, shard) == [(0,), (1,), (2,), (3,)] and replica_groups(plan, shard) == [(0, 1, 2, 3)]
    plan = replace(plan, zero=1)
    assert zero_groups(plan, shard) == [(0, 1, 2, 3)] and replica_groups(plan, shard) == [(0,), (1,), (2,), (3,)]


@pytest.mark.parametrize(
    ("hosts", "shards", "expected"),
    [
        ((0, 0, 0, 0, 1, 1, 1, 1), 4, "peer"),
        ((0, 0, 0, 0, 1, 1, 1, 1), 2, "peer"),
        ((0, 0, 0, 0, 1, 1, 1, 1), 0, "nccl"),
        ((0, 0, 0, 0, 1, 1, 1, 1), 8, "nccl"),
        ((0, 1, 0, 1, 0, 1, 0, 1), 4, "nccl"),
        ((0, 0, 1, 1, 1, 1, 0, 0), 4, "nccl"),
    ],
)
def test_groups_that_leave_no_host_are_copied_between(hosts, shards, expected) -> None:
    plan = replace(plan_with("1f1b", {"dp": 8}, shards), transport="peer", hosts=hosts)
    assert plan.transport_along("dp") == expected


def test_experts_count_too() -> None:
    """Ranks 0 and 2, which hold the same experts, are on different hosts."""
    plan = plan_with("1f1b", {"dp": 2, "ep": 2, "model": MOE}, 2)
    plan = replace(plan, transport="peer", hosts=(0, 0, 1, 1))
    assert plan.transport_along("dp") == "nccl"
