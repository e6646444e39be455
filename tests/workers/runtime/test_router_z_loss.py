"""The router's z-loss is reported as in one process; every test with MOE also trains with it."""

from __future__ import annotations

from typing import Any

import pytest
import reference_families
import torch
from plans import global_batches, plan_on_mesh
from small_models import MOE

from pentad.schedules.spec.plan import Plan
from pentad.schedules.spec.schedule_spec import MemoryOptions
from pentad.schedules.spec.tensors import tensors
from pentad.workers.params.param_init import initial_values

pytestmark = pytest.mark.slow
MESHES: list[Any] = [
    ("gpipe", {"tp": 2}, {}),
    ("1f1b", {"ep": 2, "pp": 2}, {"recompute": "full"}),
    ("dualpipev", {"cp": 2, "pp": 2}, {}),
    ("dualpipe", {"dp": 2, "pp": 2}, {"recompute": "selective"}),
    ("zb-h2", {"pp": 4}, {}),
    ("1f1b", {"dp": 2, "ep": 2}, {"memory_options": MemoryOptions(zero=3)}),
]


@pytest.mark.parametrize(("name", "sizes", "more"), MESHES)
def test_ranks_add_up_the_squares_of_all_layers(fleet, corpus, name, sizes, more):
    plan = plan_on_mesh(corpus, name, sizes, model=MOE, **more)
    found = {outcome.results[0].router_squared_lse for outcome in fleet.run(plan, [(0, 1)])}
    assert len(found) == 1
    assert found.pop() == pytest.approx(reference_squares(plan), rel=1e-10)


def reference_squares(plan: Plan) -> float:
    """The sum of squared logsumexps over the first batch, with the initial weights."""
    p = {each.name: initial_values(each, plan.seed).double() for each in tensors(plan.model)}
    batch = global_batches(plan)[0]
    routes = reference_families.routes(plan.model, p, batch.inputs, batch.following)
    return float(torch.stack([each.squared_lse.sum() for each in routes]).sum())
