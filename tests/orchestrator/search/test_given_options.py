"""Schedule options on the command line of a search."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from math import inf

import pytest

from pentad.orchestrator.config.config import load
from pentad.orchestrator.planning.estimate import memories, simulated_seconds
from pentad.orchestrator.planning.fit import DeviceMemory
from pentad.orchestrator.planning.planning import make_plan
from pentad.orchestrator.search.search import search_space
from pentad.orchestrator.search.space import space_of, with_setting
from pentad.schedules.catalogue import CATALOGUE
from pentad.schedules.ir.errors import PentadError, ScheduleError

SIZES = ["layers=8", "hidden=1024", "heads=16", "kv_heads=16", "ffn=4096", "vocab=32768"]
BATCH = ["batch.global_batch_size=16", "batch.sequence_length=1024", "cluster.device=cuda", "cluster.gpu=NVIDIA H200"]
BATCH += ["cluster.cuda_graphs=false", "data.holdout=0", "eval.every=0"]
GIVEN = ["mesh.dp=1", "mesh.pp=4", "mesh.cp=1", "mesh.tp=1", "mesh.ep=1", "zero.stage=0", "memory.unit_layers=2"]
GIVEN += ["memory.recompute=none", "memory.offload_fraction=0"]


@pytest.mark.parametrize(
    "words",
    [
        ["schedule.name=auto", "schedule.memory_limit=2"],
        ["schedule.name=zb-2p", "schedule.memory_limit=9"],
        ["schedule.name=interleaved", "schedule.chunks=2", "schedule.group=8"],
        ["schedule.name=seq-1f1b", "schedule.slices=4"],
        ["schedule.name=1f1b", "schedule.layers_per_stage=[1,2,2,3]"],
    ],
)
def test_a_search_plans_with_the_options_of_the_schedule_that_are_given(words: Sequence[str]) -> None:
    """However much memory there is, it finds the fastest of all plans that fit."""
    given = [*GIVEN, *words]
    config = load(None, [*(f"model.{each}" for each in SIZES), *BATCH, "schedule.microbatches=8", *given])
    held, plans = [word.partition("=")[0] for word in given], dict[int, float]()
    space = space_of(config, 4, held)
    for setting in space.settings(config):
        with suppress(PentadError, ScheduleError):
            plan = make_plan(with_setting(config, setting, held), "cuda", proved=False)
            needed, seconds = max(each["total"] for each in memories(plan)), simulated_seconds(plan)
            plans[needed] = min(seconds, plans.get(needed, inf))
    assert len(plans) > 1
    for room in plans:
        (found,) = search_space(config, space, DeviceMemory(room, "of a test"), held).choices
        assert found.seconds == min(seconds for needed, seconds in plans.items() if needed <= room), room


def test_schedules_that_do_not_accept_a_given_option_are_left_out() -> None:
    config = load(None, ["cluster.device=cuda", "schedule.name=zb-1p", "schedule.memory_limit=2"])
    orders = space_of(config, 8, ["schedule.memory_limit"]).orders
    assert {order.name for order in orders} == {
        name for name, entry in CATALOGUE.items() if "memory_limit" in entry.accepts
    }
