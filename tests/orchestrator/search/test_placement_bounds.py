"""What the search assumes about orders that depend on costs, before they are made, holds once they are made."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest

from pentad.orchestrator.config.config import load
from pentad.orchestrator.search.layout import Work
from pentad.orchestrator.search.placement_bounds import counts_in, order_bound, planned_counts
from pentad.orchestrator.search.result import plan_setting
from pentad.orchestrator.search.space import Order, Setting
from pentad.schedules.catalogue import CATALOGUE, generate, spec_of
from pentad.schedules.ir.columns import op_mask
from pentad.schedules.ir.instruction import Op
from pentad.schedules.ir.program import Program
from pentad.schedules.simulate.costs import Costs
from pentad.schedules.spec.mesh import Mesh

PLANNED = [name for name, entry in CATALOGUE.items() if "costs" in entry.accepts]
_F, _B = op_mask({Op.F}), op_mask({Op.B})


def planned_order(name: str, seed: int) -> tuple[Program, float]:
    """An order at random costs, and the peak activations in microbatches that none of its ranks exceeds."""
    draw, entry = random.Random(seed), CATALOGUE[name]
    ranks, microbatches = draw.choice([2, 3, 4, 6]), draw.choice([2, 5, 8, 17])
    forward, backward, weight = (
        tuple(draw.uniform(0.5, 2.0) for _ in range(ranks * entry.chunks)) for _ in ("forward", "backward", "weight")
    )
    program = generate(name, ranks, microbatches, costs=Costs(forward, backward, weight, draw.choice([0.0, 0.1, 1.0])))
    assert entry.most_saved is not None
    return program, entry.most_saved(spec_of(name, ranks, microbatches))


@pytest.mark.parametrize("name", PLANNED)
def test_no_rank_saves_more_than_the_schedule_says(name: str) -> None:
    for seed in range(8):
        program, most = planned_order(name, seed)
        op = program.columns.op
        for first, end in pairwise(program.columns.rank_offsets.tolist()):
            saved = np.cumsum(_F[op[first:end]].astype(int) - _B[op[first:end]])
            assert saved.max() <= program.chunks * most


@pytest.mark.parametrize("name", PLANNED)
def test_a_rank_runs_no_less_before_its_last_actions_than_is_said_and_no_more_before_its_first_backward(
    name: str,
) -> None:
    for seed in range(8):
        program, most = planned_order(name, seed)
        known = planned_counts(program.ranks, program.chunks, program.microbatches, int(most))
        counts = counts_in(program)
        assert (counts.adding >= known.adding).all() and (counts.backward >= known.backward).all()
        assert (counts.forwards.sum(axis=1) <= program.chunks * most).all() and (counts.first == known.first).all()


@pytest.mark.parametrize("name", PLANNED)
def test_no_step_is_shorter_than_its_bound_before_the_order_is_made(name: str) -> None:
    sizes = ("layers=16", "hidden=1024", "heads=16", "kv_heads=16", "ffn=4096", "vocab=1024")
    words = ["cluster.device=cuda", "cluster.gpu=NVIDIA H200", "batch.global_batch_size=64", "mesh.pp=1"]
    config = load(None, [*(f"model.{each}" for each in sizes), *words, "schedule.name=1f1b"])
    work, order = Work(config), Order(name)
    for mesh, count, zero in ((Mesh(2, 2), 4, 1), (Mesh(2, 4), 4, 0), (Mesh(1, 4), 32, 0), (Mesh(2, 8), 32, 1)):
        plan = plan_setting(config, Setting(mesh, count, order, zero), ())
        bound = order_bound(work.layout(mesh, count, order, None, by_layer=False), order, count)
        assert 0.5 * plan.seconds < bound <= plan.seconds * (1 + 1e-9)


def test_what_comes_before_the_last_gradients_is_counted_by_stage() -> None:
    order = generate("looped-bfs", 2, 2)
    assert " ".join(map(str, order.streams[0])) == "0F0 0F1 2F0 2F1 2BW0 2BW1 0BW0 0BW1"
    counts = counts_in(order)
    of_stage_0, of_stage_2 = counts.adding[0].tolist()
    assert of_stage_0 == [[2, 1, 1], [2, 2, 2]] and of_stage_2 == [[2, 0, 0], [2, 1, 1]]
    assert (counts.backward == counts.adding).all(), "both at once"
    assert counts.forwards[0].tolist() == [2, 2] and counts.first[0] == 1
