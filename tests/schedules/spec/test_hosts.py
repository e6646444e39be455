"""Hosts of ranks, and which groups exchange data by peer copies: those within a host."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from random import Random

import pytest
from plans import plan_of

from pentad.schedules.spec.mesh import ORDER, Mesh, hosts_of_size, numbered
from pentad.schedules.spec.schedule_spec import MemoryOptions


def test_hosts_are_numbered_in_the_order_of_ranks() -> None:
    assert numbered("bbaac") == (0, 0, 1, 1, 2) and numbered("aaa") == numbered("") == ()


@pytest.mark.parametrize("gpus", [1, 2, 3, 4, 8])
def test_hosts_are_filled_by_replica_then_stage_with_tensor_ranks_adjacent(gpus: int) -> None:
    mesh = Mesh(dp=2, pp=2, cp=2, tp=2, ep=2)
    hosts = hosts_of_size(mesh, gpus)
    at = [mesh.coordinates(rank) for rank in range(mesh.size)]
    line = sorted(range(mesh.size), key=lambda rank: (at[rank].dp, at[rank].pp, at[rank].ep, at[rank].cp, at[rank].tp))
    for a, b in product(range(mesh.size), repeat=2):
        assert (hosts[line[a]] == hosts[line[b]]) == (a // gpus == b // gpus)
    assert hosts_of_size(mesh, mesh.size) == ()


@pytest.mark.sampled(12)
@pytest.mark.parametrize("zero", [0, 1, 3])
@pytest.mark.parametrize("name", ["1f1b", "dualpipe"])
@pytest.mark.parametrize("seed", range(6))
def test_an_axis_is_copied_along_if_no_group_of_it_leaves_a_host(name: str, zero: int, seed: int) -> None:
    plan = plan_of(name, 2, 2, 4, "corpus", memory_options=MemoryOptions(zero=zero), tp=2, cp=2)
    order = [rank ^ seed for rank in range(plan.mesh.size)]
    hosts = numbered(order[rank] >> Random(seed).choice((1, 2, 3)) for rank in range(plan.mesh.size))
    assert {plan.transport_along(axis) for axis in ORDER} == {"gloo"}
    plan = replace(plan, transport="peer", hosts=hosts)
    pairs = list(product(range(plan.mesh.size), repeat=2))
    for axis in ("pp", "cp", "tp"):
        groups = [(a, b) for a, b in pairs if plan.mesh.move(a, **{axis: getattr(plan.mesh.coordinates(b), axis)}) == b]
        apart = any(hosts[a] != hosts[b] for a, b in groups)
        assert plan.transport_along(axis) == ("nccl" if apart else "peer")
    holders = [plan.holders(shard) for shard in plan.param_shards]
    apart = any(len({hosts[rank] for rank in its}) > 1 for its in holders)
    assert plan.transport_along("dp") == ("nccl" if apart or not zero else "peer")
    for rank in range(plan.mesh.size):
        assert plan.ranks_beside(rank) == tuple(other for other in range(plan.mesh.size) if hosts[other] == hosts[rank])


def test_nccl_everywhere_is_nccl_everywhere() -> None:
    plan = replace(plan_of("1f1b", 2, 2, 4, "corpus"), transport="nccl")
    assert {plan.transport_along(axis) for axis in ORDER} == {"nccl"}
