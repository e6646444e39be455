"""Laws 1 and 4 with stages of several units: one process's result, and the bits of whole stages."""

from __future__ import annotations

import pytest
from exactness import assert_equals_one_process
from plans import plan_of
from small_models import HEADS, MOE

from pentad.schedules.spec.schedule_spec import MemoryOptions

pytestmark = pytest.mark.timeout(60)
slow = pytest.mark.slow
CASES = [
    pytest.param("1f1b", {"dp": 2, "pp": 2}, 1, MemoryOptions(zero=3, max_gathered=2), {}),
    pytest.param("zb-h2", {"pp": 2, "dp": 2}, 2, MemoryOptions(zero=2), {"recompute": "full"}),
    pytest.param("dualpipe", {"pp": 2, "ep": 2}, 1, MemoryOptions(zero=3), {"model": MOE}),
    pytest.param("zb-v", {"pp": 2, "tp": 2}, 1, MemoryOptions(), {"model": HEADS, "recompute": "selective"}),
]


@pytest.mark.parametrize(("name", "axes", "unit_layers", "memory_options", "more"), CASES)
def test_units_equal_one_process(fleet, corpus, name, axes, unit_layers, memory_options, more) -> None:
    given = {"dp": 1, "pp": 1, "microbatches": 4, "data": corpus, "memory_options": memory_options, **axes, **more}
    assert_equals_one_process(fleet, plan_of(name, unit_layers=unit_layers, **given))
