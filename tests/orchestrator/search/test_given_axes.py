"""Axes on the command line of a search, and schedules that are the same on some meshes."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Sequence

import pytest
from commands import Pentad

from pentad.orchestrator.config.config import load
from pentad.orchestrator.search.space import AXES, all_meshes, space_of
from pentad.schedules.catalogue import CATALOGUE
from pentad.schedules.spec.mesh import Mesh


@pytest.mark.parametrize(
    ("axes", "sentence"),
    [
        (("mesh.pp=3",), "mesh.pp is 3: expected a divisor of the number of GPUs, 8"),
        (("mesh.dp=4", "mesh.pp=4"), "mesh.dp x mesh.pp is 16: expected a divisor of the number of GPUs, 8"),
        (
            [f"mesh.{axis}=1" for axis in AXES],
            "mesh.dp x mesh.pp x mesh.cp x mesh.tp x mesh.ep is 1: expected the number of GPUs, 8",
        ),
    ],
)
def test_axes_that_are_held_divide_the_gpus(pentad: Pentad, axes: Sequence[str], sentence: str) -> None:
    """The error used to be that nothing fits in memory, on none of 0 meshes."""
    assert pentad("plan", "--gpus", "8", *axes) == (1, "", f"pentad: {sentence}\n")


def test_axes_may_be_given_that_the_schedule_of_the_file_does_not_go_with(pentad: Pentad) -> None:
    """16 sequences are too few for 8 microbatches on 4 replicas, but the search chooses the microbatches anyway."""
    found = json.loads(pentad("plan", "--gpus", "4", "mesh.dp=4", "--json")[1])
    best = found["choices"][0]
    assert best["mesh"]["dp"] == 4
    words = [*shlex.split(best["command"])[2:], "cluster.device=cuda"]
    assert load(None, words).schedule.microbatches == best["settings"]["schedule.microbatches"]
    assert pentad("plan", "--gpus", "4", "mesh.dp=4", "schedule.microbatches=8")[2].startswith(
        "pentad: batch.global_batch_size is 16: expected a multiple of mesh.dp x schedule.microbatches = 4 x 8 = 32"
    )


def test_one_microbatch_on_one_pipeline_rank_is_planned_with_one_schedule() -> None:
    """looped-bfs, which then does the same work in the same order, used to be listed instead of 1f1b."""
    space = space_of(load(None, ["cluster.device=cuda"]), 8)
    for mesh, microbatches, names in (
        (Mesh(dp=8), 1, {"1f1b"}),
        (Mesh(dp=8), 2, {"1f1b", "looped-bfs"}),
        (Mesh(dp=4, pp=2), 1, set(CATALOGUE)),
    ):
        assert {order.name for order in space.orders_on(mesh, microbatches)} == names


def test_every_factorisation_is_tried_once() -> None:
    for ranks in (1, 6, 8, 64):
        every = list(all_meshes(ranks))
        assert len(set(every)) == len(every)
        assert {mesh.size for mesh in every} == {ranks}
    assert len(list(all_meshes(64))) == math.comb(10, 4)
