"""Ranks that switch to another compute order between two steps end with the bits of the old order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from plans import plan_of
from small_models import FAMILIES, MOE
from worker_processes import call_all, losses_and_state, ranks_of, recover, start_run, uninterrupted

from pentad.orchestrator.activations.offloaded_tensors import with_slots
from pentad.schedules.search.reorder import adds_alike
from pentad.schedules.spec.plan import Plan
from pentad.schedules.spec.schedule_spec import MemoryOptions

pytestmark = pytest.mark.timeout(150)
slow = pytest.mark.slow
PAIR: dict[str, Any] = {"dp": 1, "pp": 2, "microbatches": 4}
LINE: dict[str, Any] = {"dp": 1, "pp": 4, "microbatches": 8}
SQUARE: dict[str, Any] = {"dp": 2, "pp": 2, "microbatches": 4}
STEPS, BEFORE = 6, 3


def make_plan(name: str, corpus: str, axes: dict[str, Any]) -> Plan:
    return with_slots(plan_of(**{"name": name, "data": corpus, "dtype": "float32", **axes}))


@pytest.mark.parametrize(
    ("name", "other", "axes", "dies"),
    [
        ("1f1b", "zb-h1", PAIR, False),
        pytest.param("gpipe", "zb-h2", LINE, False, marks=slow),
        pytest.param("zb-v", "v-half", LINE, False, marks=slow),
        pytest.param("interleaved", "looped-bfs", {**SQUARE, "post_validation": True}, False, marks=slow),
        pytest.param("1f1b", "zb-h2", {**SQUARE, "recompute": "full"}, False, marks=slow),
        pytest.param("1f1b", "zb-h2", {**SQUARE, "dtype": "bfloat16"}, False, marks=slow),
        pytest.param("1f1b", "gpipe", {**SQUARE, "memory_options": MemoryOptions(zero=3)}, False, marks=slow),
        pytest.param("zb-h1", "gpipe", {**PAIR, "ep": 2, "model": MOE}, False, marks=slow),
        pytest.param("zb-h1", "1f1b", {**PAIR, "tp": 2, "model": FAMILIES["qwen3"]}, False, marks=slow),
        pytest.param("1f1b", "zb-h1", SQUARE, True, marks=slow),
    ],
)
def test_bits_stay_when_the_order_changes(workers, corpus, name, other, axes, dies):
    """`dies`: one rank dies after others have adopted the new order and before they are connected."""
    plan, changed = make_plan(name, corpus, axes), make_plan(other, corpus, axes)
    assert adds_alike(plan.program, changed.program) and plan.program.hash != changed.program.hash
    with ranks_of(workers, plan.mesh.size) as ranks:
        expected = uninterrupted(ranks, plan, STEPS)
        start_run(ranks, plan)
        first, generation = call_all(ranks, "run", 0, BEFORE), 2
        if dies:
            for rank, worker in enumerate(ranks):
                worker.answer(worker.call_now("fence"))
                worker.answer(worker.call("leave"))
                worker.answer(worker.call("make", changed, rank, generation))
            generation = 3
        version, _ = recover(ranks, [1] if dies else [], changed, generation)
        assert version == BEFORE
        found = losses_and_state(ranks, [*first, *call_all(ranks, "run", BEFORE, STEPS - BEFORE)], 0)
        call_all(ranks, "close")
    assert found[0] == expected[0] and found[1].keys() == expected[1].keys()
    assert all(torch.equal(found[1][key], value) for key, value in expected[1].items())


def test_orders_that_reduce_after_other_microbatches_add_up_otherwise(corpus):
    """So do stages on other ranks or in other units, and those whose copies compute other microbatches."""
    zero = {**SQUARE, "memory_options": MemoryOptions(zero=2)}
    every = {**SQUARE, "memory_options": MemoryOptions(zero=2, reduce="microbatch")}
    of = [("1f1b", zero), ("1f1b", every), ("interleaved", SQUARE), ("1f1b", {**SQUARE, "unit_layers": 1})]
    programs = [make_plan(name, corpus, axes).program for name, axes in of]
    for number, one in enumerate(programs):
        assert [adds_alike(one, other) for other in programs] == [number == at for at in range(len(programs))]
