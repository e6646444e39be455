"""Laws 1 and 4 with stages of several units: one process's result, and the bits of whole stages."""

from __future__ import annotations

import pytest
from bits import same_bits
from exactness import assert_equals_one_process
from plans import STEPS, plan_of
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


@pytest.mark.parametrize(
    ("name", "recompute"),
    [("zb-h2", "full"), *(pytest.param(name, "none", marks=slow) for name in ("zb-v", "dualpipe", "1f1b"))],
)
def test_units_have_the_bits_of_whole_stages(fleet, corpus, name, recompute) -> None:
    """Without clipping: the norm is summed by unit, so its last digits differ."""
    runs = []
    for unit_layers in (None, 1, 2):
        given = {"dtype": "float32", "clip": 1e9, "recompute": recompute, "unit_layers": unit_layers}
        runs.append(fleet.run(plan_of(name, 1, 2, 4, corpus, **given), [(0, STEPS)]))
    for whole, *others in zip(*runs, strict=True):
        for other in others:
            assert [each.losses for each in whole.results] == [each.losses for each in other.results]
            assert same_bits(whole.state, other.state)
