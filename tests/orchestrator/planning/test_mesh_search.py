"""`pentad plan --gpus` tries every mesh, lists those that fit, fastest first, and is quick."""

from __future__ import annotations

import json
import math
import time
from dataclasses import asdict, replace

import pytest
from commands import Pentad

from pentad.orchestrator.config.config import RunConfig, load
from pentad.orchestrator.planning.estimate import memories
from pentad.orchestrator.planning.fit import DeviceMemory, device_memory
from pentad.orchestrator.planning.mesh_search import MeshSearch, all_meshes, overrides_of, search_meshes
from pentad.orchestrator.planning.planning import make_plan

EIGHT = ("layers=32", "hidden=4096", "heads=32", "kv_heads=8", "ffn=14336", "vocab=128256")
H200 = device_memory("cuda", 139)


def config(*overrides: str, model: tuple[str, ...] = EIGHT, sequences: int = 64) -> RunConfig:
    sizes = [f"batch.global_batch_size={sequences}", "batch.sequence_length=4096", "schedule.name=1f1b"]
    return load(None, [*(f"model.{each}" for each in model), *sizes, *overrides])


@pytest.fixture(scope="module")
def found() -> MeshSearch:
    return search_meshes(config(), 8, H200)


def test_every_factorisation_is_tried_once() -> None:
    for ranks in (1, 6, 8, 64):
        every = list(all_meshes(ranks))
        assert len(set(every)) == len(every)
        assert {mesh.size for mesh in every} == {ranks}
    assert len(list(all_meshes(64))) == math.comb(10, 4)


def test_listed_meshes_fit_and_the_fastest_comes_first(found: MeshSearch) -> None:
    assert found.choices
    assert [each.seconds for each in found.choices] == sorted(each.seconds for each in found.choices)
    assert all(each.bytes <= H200.bytes for each in found.choices)
    assert found.num_fitting + sum(found.rejected.values()) == len(list(all_meshes(8)))
    assert any(sentence.startswith("mesh.ep is 2: expected 1") for sentence in found.rejected)


def test_the_overrides_of_a_mesh_give_its_plan_and_its_peak_memory(found: MeshSearch) -> None:
    best = found.choices[0]
    overrides = [f"{key}={value}" for key, value in overrides_of(best.plan).items()]
    plan = make_plan(config(*overrides), "cuda")
    plan = replace(plan, eval=None)  # which does not decide on a mesh
    assert plan == best.plan
    assert max(each["total"] for each in memories(plan)) == best.bytes


@pytest.mark.slow
def test_less_memory_requires_recomputation_and_sharding_or_rejects_meshes(found: MeshSearch) -> None:
    narrow, none = (search_meshes(config(), 8, DeviceMemory(gib * 2**30, "of a device")) for gib in (24, 8))
    assert found.num_fitting > narrow.num_fitting > none.num_fitting == 0
    assert not none.choices
    assert any(each.plan.zero or each.plan.recompute for each in narrow.choices)
    assert any("memory is 8 GiB a rank: expected at least" in sentence for sentence in none.rejected)


@pytest.mark.slow
def test_tp_ranks_share_a_node_unless_allowed_to_span_several() -> None:
    inside, across = (search_meshes(config(*more), 16, H200) for more in ((), ("mesh.tp_across_nodes=true",)))
    assert any("mesh.tp is 16: expected at most 8" in sentence for sentence in inside.rejected)
    assert not any("expected at most 8" in sentence for sentence in across.rejected)


def test_experts_may_be_sharded_over_ep_ranks() -> None:
    sizes = ("family=mixtral", "experts.num_experts=8", "experts.top_k=2", "experts.intermediate_size=3584", *EIGHT)
    found = search_meshes(config(model=sizes), 8, H200)
    assert any(each.plan.mesh.ep > 1 for each in found.choices)


@pytest.mark.slow
def test_sixty_four_gpus_take_seconds() -> None:
    started = time.process_time()
    assert search_meshes(config(sequences=256), 64, H200).choices
    assert time.process_time() - started < 10


def test_the_command_lists_meshes(pentad: Pentad) -> None:
    few = ("schedule.name=1f1b", "--gpus", "4")
    status, out, err = pentad("plan", *few)
    assert (status, err) == (0, "")
    assert "the first one: mesh.dp=" in out
    facts = json.loads(pentad("plan", *few, "--json")[1])
    assert facts["meshes"][0]["mesh"].keys() == asdict(next(all_meshes(1))).keys()
    assert math.prod(facts["meshes"][0]["mesh"].values()) == 4
    status, out, _ = pentad("plan", *few, "--memory", "0.01")
    assert status == 1
    assert "0 meshes of 4 GPUs fit" in out
