"""Steps that are launched as an earlier one was captured have the bits of steps that are issued, as long as what is
captured refers to nothing that another step would find elsewhere or changed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from bits import same_bits
from plans import SHALLOW, plan_of

from pentad.schedules.spec.schedule_spec import MemoryOptions

pytestmark = pytest.mark.timeout(180)
slow = pytest.mark.slow
ZERO_3 = MemoryOptions(zero=3)
STEPS = 9  # two of each buffer are issued and captured, the others launched
CASES: list[Any] = [
    pytest.param("1f1b", {"pp": 2, "microbatches": 4}, marks=slow),
    ("zb-h2", {"dp": 2, "pp": 2, "microbatches": 4}),
    pytest.param("zb-h2", {"pp": 2, "microbatches": 4, "post_validation": True}, marks=slow),
    pytest.param("zb-v", {"pp": 2, "microbatches": 6}, marks=slow),
    pytest.param("dualpipe", {"pp": 4, "microbatches": 8}, marks=slow),
    pytest.param("seq-1f1b", {"pp": 2, "microbatches": 2, "slices": 2}, marks=slow),
    pytest.param("1f1b", {"pp": 2, "microbatches": 3, "unit_layers": 1, "recompute": "attention"}, marks=slow),
    pytest.param("1f1b", {"pp": 2, "microbatches": 3, "unit_layers": 1, "recompute": "full"}, marks=slow),
    pytest.param("1f1b", {"dp": 2, "pp": 2, "microbatches": 4, "memory_options": ZERO_3}, marks=slow),
    pytest.param("1f1b", {"pp": 1, "tp": 2, "microbatches": 2}, marks=slow),
    pytest.param("zb-h2", {"pp": 2, "tp": 2, "microbatches": 4, "logit_rows": 5}, marks=slow),
    pytest.param("zb-v", {"dp": 2, "pp": 2, "microbatches": 4, "logit_rows": 5, "memory_options": ZERO_3}, marks=slow),
    pytest.param("dualpipev", {"pp": 2, "tp": 2, "microbatches": 4}, marks=slow),
    pytest.param("1f1b", {"pp": 1, "cp": 2, "microbatches": 2, "cp_method": "all_gather"}, marks=slow),
]


@pytest.mark.parametrize(("name", "sizes"), CASES)
def test_launched_steps_have_the_bits_of_issued_ones(fleet, corpus, name: str, sizes: dict[str, Any]) -> None:
    plan = plan_of(**{"name": name, "dp": 1, "data": corpus, "dtype": "float32", "model": SHALLOW, **sizes})
    calls = [(0, 5), (5, STEPS - 5)]
    issued = fleet.run(plan, calls)
    launched = fleet.run(replace(plan, cuda_graphs=True), calls)
    for a, b in zip(issued, launched, strict=True):
        assert [(r.losses, r.grad_norm) for r in a.results] == [(r.losses, r.grad_norm) for r in b.results]
        assert same_bits(a.state, b.state)
