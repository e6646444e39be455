"""ZeRO within each host, if the ranks with the same parameters are on several."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from math import inf
from pathlib import Path

import pytest

from pentad.orchestrator.config.config import RunConfig, load
from pentad.orchestrator.gpus.rate_table import RateTable, write_table
from pentad.orchestrator.planning.estimate import memories, simulated_seconds
from pentad.orchestrator.planning.fit import DeviceMemory
from pentad.orchestrator.planning.hardware import rates_of
from pentad.orchestrator.planning.planning import make_plan
from pentad.orchestrator.search.search import search, search_space
from pentad.orchestrator.search.space import Order, Space, space_of, with_setting
from pentad.schedules.ir.errors import PentadError, ScheduleError
from pentad.schedules.simulate.rates import Links
from pentad.schedules.spec.mesh import DENSE_AXES, EXPERT_AXES, Mesh, are_on_one_host, hosts_of_size

GPU = "NVIDIA H200"
DENSE = ("layers=4", "hidden=1024", "heads=16", "kv_heads=16", "ffn=4096", "vocab=32768")
EXPERTS = ("family=mixtral", "experts.num_experts=4", "experts.top_k=2", "experts.intermediate_size=1024")
MESHES = Mesh(dp=16), Mesh(dp=8, tp=2), Mesh(dp=4, pp=4), Mesh(dp=4, cp=4), Mesh(dp=8, ep=2), Mesh(dp=4, ep=4)


def config_of(*words: str) -> RunConfig:
    sizes = [f"model.{each}" for each in DENSE]
    batch = ["batch.global_batch_size=64", "batch.sequence_length=1024", "schedule.name=1f1b"]
    plain = ["data.holdout=0", "eval.every=0", "cluster.cuda_graphs=false", f"cluster.gpu={GPU}"]
    return load(None, [*sizes, *batch, "cluster.device=cuda", *plain, *words])


def space_on_two_hosts(config: RunConfig) -> Space:
    every = space_of(config, 16)
    orders, recompute = (Order("1f1b"), Order("zb-h1"), Order("dualpipe")), ("none", "full")
    meshes = tuple(mesh for mesh in MESHES if config.model.experts is not None or mesh.ep == 1)
    space = replace(every, meshes=meshes, microbatches=(4,), orders=orders, unit_layers=(None,), max_gathered=(None,))
    return replace(space, recompute=recompute, recompute_layers=(None,), offload=(0.0,))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("words", [(), tuple(f"model.{each}" for each in EXPERTS)])
def test_the_search_finds_what_brute_force_finds_on_two_hosts(tmp_path: Path, words: tuple[str, ...]) -> None:
    """Groups are worth it if a GPU has 50 Gbit/s to other hosts."""
    slow = replace(rates_of("cuda", GPU), inter_host=Links.uniform(60e-6, 50 / 8 * 1e9))
    path = tmp_path / "slow.json"
    write_table(RateTable(version=4, gpu=GPU, measured="2026-11-30", ranks=(2, 2), assumed=(), rates=slow), path)
    config = config_of(*words, f"cluster.rates={path}")
    space, plans = space_on_two_hosts(config), list[tuple[Mesh, float, int, int | None]]()
    for setting in space.settings(config):
        with suppress(PentadError, ScheduleError):
            plan = make_plan(with_setting(config, setting), "cuda", proved=False)
            needed = max(each["total"] for each in memories(plan))
            plans.append((setting.mesh, simulated_seconds(plan), needed, setting.shards))
    fastest = set[int | None]()
    sizes = sorted(needed for _, _, needed, _ in plans)
    for share in (0.05, 0.2, 0.5, 1.0):
        room, best = sizes[int(share * (len(sizes) - 1))], dict[Mesh, float]()
        for mesh, seconds, needed, _ in plans:
            if needed <= room:
                best[mesh] = min(seconds, best.get(mesh, inf))
        found = search_space(config, space, DeviceMemory(room, "of a test"), ("cluster.transport",))
        assert [each.seconds for each in found.choices] == pytest.approx(sorted(best.values())[:5], rel=1e-8)
        fastest |= {each.setting.shards for each in found.choices}
    assert len(fastest) > 1 and None in fastest


@pytest.mark.parametrize("gpus", [8, 16, 64])
@pytest.mark.parametrize("words", [(), tuple(f"model.{each}" for each in EXPERTS)])
def test_groups_are_the_largest_inside_hosts(gpus: int, words: tuple[str, ...]) -> None:
    config = config_of(*words)
    space = space_of(config, gpus)
    for mesh in space.meshes:
        hosts, holders = hosts_of_size(mesh, 8), mesh.dp * mesh.cp * (mesh.ep if not words else 1)
        kinds = (DENSE_AXES, EXPERT_AXES) if words else (DENSE_AXES,)
        fitting = [
            count
            for count in range(2, holders + 1)
            if holders % count == 0 and all(are_on_one_host(mesh, axes, hosts, count) for axes in kinds)
        ]
        crosses = not are_on_one_host(mesh, DENSE_AXES, hosts)
        if words or mesh.ep == 1:
            assert space.shards_on(config, mesh) == (None, *fitting[-1:] * crosses), mesh


def test_shards_that_are_given_stay() -> None:
    config = config_of("zero.stage=1", "zero.shards=4", "mesh.dp=4", "schedule.microbatches=4")
    found = search(config, 16, DeviceMemory(2**37, "of a test"), ["zero.shards", "schedule.name"])
    assert found.choices and {each.plan.zero_shards for each in found.choices} == {4}
