"""Evaluations have the losses of one process on every mesh, and leave no trace in the training state."""

from __future__ import annotations

import pytest
from bits import assert_same_runs
from evaluations import assert_evaluates_like_one_process, with_eval
from plans import STEPS, plan_of, plan_on_mesh
from small_models import HEADS, MOE

from pentad.schedules.spec.schedule_spec import MemoryOptions

slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("name", "sizes", "zero"),
    [
        ("dualpipe", {"pp": 2, "ep": 2}, 3),
    ],
)
def test_evaluations_have_the_losses_of_one_process_and_change_nothing(fleet, corpus, name, sizes, zero):
    plan = plan_on_mesh(corpus, name, sizes, model=MOE, memory_options=MemoryOptions(zero=zero))
    evaluated = assert_evaluates_like_one_process(fleet, with_eval(plan, 21))
    assert_same_runs(evaluated, fleet.run(plan, [(0, 2), (2, STEPS - 2)]))
