"""What the optimizer updates alike, and who orthogonalizes what: every element and every matrix exactly once."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fp8_plans import EXPERTS, WIDE_EXPERTS
from hypothesis import given
from hypothesis import strategies as st
from plans import plan_of
from small_models import MOE

from pentad.schedules.spec.optimizer import ParamGroup
from pentad.schedules.spec.schedule_spec import MemoryOptions
from pentad.schedules.spec.zero_layout import num_muon_elements, zero_layout
from pentad.workers.params.local_tensor import local_matrices, local_tensors
from pentad.workers.params.muon import share_out
from pentad.workers.params.update_layout import update_layout

GROUPS = (ParamGroup("*.attention.out", 0.5), ParamGroup("*norm", weight_decay=0.1))


@pytest.mark.parametrize("name", ["adamw", "muon"])
@pytest.mark.parametrize(
    "sizes",
    [
        {"tp": 2},
        {"dp": 2, "zero": 1},
        {"ep": 2, "dp": 2, "zero": 3},
        {"dp": 3, "zero": 3, "model": WIDE_EXPERTS, "fp8": replace(EXPERTS, gathers=True)},
    ],
)
def test_runs_and_their_places_cover_a_shard_once(corpus, name, sizes):
    """No run crosses the border to what is gathered in 8 bits."""
    mesh = {"dp": 1, "model": MOE, **sizes}
    options = MemoryOptions(zero=mesh.pop("zero", 0))
    plan = plan_of("zb-v", pp=2, microbatches=4, data=corpus, memory_options=options, **mesh)
    spec = replace(plan.optimizer, name=name, groups=GROUPS)
    plan = replace(plan, optimizer=spec)
    for rank in range(plan.mesh.size):
        for shard in plan.param_shards_of(rank):
            layout, local = zero_layout(plan, shard, rank), local_tensors(plan, shard)
            updates = update_layout(spec, local, layout)
            ends = [0]
            for run in sorted(updates.runs, key=lambda run: run.where.start):
                assert run.where.start == ends[-1]
                assert run.where.stop <= layout.compute_part or run.where.start >= layout.compute_part
                ends.append(run.where.stop)
            assert ends[-1] == layout.part
            for method, size in (("adamw", updates.num_adamw), ("muon", updates.num_muon)):
                places = [run.place for run in updates.runs if run.rule.method == method]
                assert [each.start for each in places] == [0, *(each.stop for each in places[:-1])][: len(places)]
                assert (places[-1].stop if places else 0) == size
            assert updates.num_muon == num_muon_elements(plan, shard, rank)
            assert updates.num_muon + updates.num_adamw == layout.part


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_the_parts_of_tp_ranks_make_up_every_matrix(corpus, tp):
    plan = plan_of("gpipe", 1, 1, 1, corpus, model=MOE, tp=tp)
    for shard in (shard for shard in plan.param_shards if shard.tp == 0):
        by_rank = [local_tensors(plan, shard._replace(tp=rank)) for rank in range(tp)]
        for parts in zip(*by_rank, strict=True):
            if len(parts[0].shape) - parts[0].tensor.experts < 2:
                continue
            for blocks in zip(*map(local_matrices, parts), strict=True):
                elements = {
                    (row, column)
                    for block in blocks
                    for row in range(*block.own_rows)
                    for column in range(*block.own_columns)
                }
                assert len(elements) == blocks[0].rows * blocks[0].columns
            assert [list(local_matrices(part))[-1].end for part in parts] == [part.size for part in parts]


@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), max_size=30), st.integers(1, 8), st.integers(1, 5000)
)
def test_matrices_have_one_owner_and_ranks_equal_work(sizes, ranks, limit):
    rounds = list(share_out(sizes, ranks, limit))
    owners = {number: owner for each in rounds for number, owner in each.items()}
    assert [number for each in rounds for number in each] == list(range(len(sizes)))
    assert all(len(each) == 1 or sum(sizes[n][0] * sizes[n][1] for n in each) <= limit for each in rounds)
    costs = [min(size) ** 2 * (2 * max(size) + min(size)) for size in sizes]
    loads = [sum(costs[number] for number, owner in owners.items() if owner == rank) for rank in range(ranks)]
    assert max(loads) - min(loads) <= max(costs, default=0)
