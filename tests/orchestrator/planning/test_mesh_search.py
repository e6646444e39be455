"""Laws of `pentad plan --gpus`: every mesh is looked at, what is listed fits and is sorted, and it is quick."""

from __future__ import annotations

import json
import math
import time
from dataclasses import asdict

import pytest
from commands import Pentad, pentad

from pentad.orchestrator.config.config import RunConfig, load
from pentad.orchestrator.planning.estimate import memories
from pentad.orchestrator.planning.fit import Room, room_of
from pentad.orchestrator.planning.mesh_search import changed, meshes, survey
from pentad.orchestrator.planning.planning import make_plan

__all__ = ["pentad"]
EIGHT = ("layers=32", "hidden=4096", "heads=32", "kv_heads=8", "ffn=14336", "vocab=128256")
H200 = room_of("cuda", 139)


def config(*overrides: str, model: tuple[str, ...] = EIGHT, sequences: int = 64) -> RunConfig:
    sizes = [f"batch.global_batch_size={sequences}", "batch.sequence_length=4096", "schedule.name=1f1b"]
    return load(None, [*(f"model.{each}" for each in model), *sizes, *overrides])


@pytest.fixture(scope="module")
def found():
    return survey(config(), 8, H200)


def test_every_factorisation_comes_once() -> None:
    for ranks in (1, 6, 8, 64):
        every = list(meshes(ranks))
        assert len(set(every)) == len(every)
        assert {mesh.size for mesh in every} == {ranks}
    assert len(list(meshes(64))) == math.comb(10, 4)


def test_what_is_listed_fits_and_the_quickest_come_first(found) -> None:
    assert found.found
    assert [each.seconds for each in found.found] == sorted(each.seconds for each in found.found)
    assert all(each.bytes <= H200.bytes for each in found.found)
    assert found.fit + sum(found.left_out.values()) == len(list(meshes(8)))
    assert any(sentence.startswith("mesh.ep is 2: expected 1") for sentence in found.left_out)


def test_what_is_listed_is_what_the_configuration_gives(found) -> None:
    """Its overrides make the same plan, whose fullest rank needs what is said."""
    best = found.found[0]
    overrides = [f"{key}={value}" for key, value in changed(best.plan).items()]
    plan = make_plan(config(*overrides), "cuda")
    assert plan == best.plan
    assert max(each["total"] for each in memories(plan)) == best.bytes


def test_less_room_asks_for_more_recompute_and_shards_or_leaves_meshes_out() -> None:
    wide, narrow, none = (survey(config(), 8, Room(gib * 2**30, "of a device")) for gib in (139, 45, 8))
    assert wide.fit > narrow.fit > none.fit == 0
    assert not none.found
    spared = [(each.plan.zero, each.plan.recompute) for each in narrow.found]
    assert any(zero or modes for zero, modes in spared)
    assert any("room is 8 GiB a rank, but mesh" in sentence for sentence in none.left_out)


def test_tensor_ranks_stay_on_a_node_unless_they_may_leave_it() -> None:
    inside, across = (survey(config(*more), 16, H200) for more in ((), ("mesh.tp_across_nodes=true",)))
    assert any("mesh.tp is 16: expected at most 8" in sentence for sentence in inside.left_out)
    assert not any("expected at most 8" in sentence for sentence in across.left_out)


def test_experts_open_the_fifth_axis() -> None:
    sizes = ("family=mixtral", "experts.num_experts=8", "experts.top_k=2", "experts.intermediate_size=3584", *EIGHT)
    found = survey(config(model=sizes), 8, H200)
    assert any(each.plan.mesh.ep > 1 for each in found.found)


def test_sixty_four_gpus_take_seconds() -> None:
    started = time.process_time()
    assert survey(config(sequences=256), 64, H200).found
    assert time.process_time() - started < 10


def test_the_command_lists_them(pentad: Pentad) -> None:
    few = ("schedule.name=1f1b", "--gpus", "4")
    status, out, err = pentad("plan", *few)
    assert (status, err) == (0, "")
    assert "the first one: mesh.dp=" in out
    facts = json.loads(pentad("plan", *few, "--json")[1])
    assert facts["found"][0]["mesh"].keys() == asdict(next(meshes(1))).keys()
    assert math.prod(facts["found"][0]["mesh"].values()) == 4
    status, out, _ = pentad("plan", *few, "--memory", "0.01")
    assert status == 1
    assert "0 meshes of 4 GPUs fit" in out
