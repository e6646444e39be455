"""A batch-size ramp gives the same on every mesh, and the same bits as batch sizes that are changed by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from bits import same_bits
from exactness import assert_equals_one_process
from fleet import Fleet
from plans import STEPS, plan_of, with_rampup
from resume import assert_repeatable, save_and_resume
from small_models import HEADS, MOE

from pentad.schedules.spec.plan import Plan
from pentad.schedules.spec.schedule_spec import MemoryOptions
from pentad.workers.checkpoint import checkpoint

slow = pytest.mark.slow
MESHES: list[Any] = [
    ("zb-h2", 6, {"pp": 2}),
    pytest.param("zb-h2", 6, {"pp": 2, "post_validation": True, "clip": 1e-3}, marks=slow),
    pytest.param("dualpipev", 6, {"pp": 2}, marks=slow),
    pytest.param("dualpipe", 8, {"pp": 2, "dp": 2}, marks=slow),
    pytest.param("zb-h2", 6, {"pp": 2, "tp": 2}, marks=slow),
    pytest.param("1f1b", 6, {"pp": 2, "cp": 2, "model": HEADS}, marks=slow),
    pytest.param("1f1b", 6, {"pp": 2, "ep": 2, "model": MOE}, marks=slow),
    pytest.param("1f1b", 6, {"cp": 2, "tp": 2, "model": MOE}, marks=slow),
    pytest.param("gpipe", 6, {"dp": 4, "memory_options": MemoryOptions(zero=3)}, marks=slow),
    pytest.param("zb-v", 6, {"dp": 2, "pp": 2, "memory_options": MemoryOptions(zero=3, max_gathered=2)}, marks=slow),
    pytest.param(
        "interleaved", 6, {"dp": 2, "pp": 2, "chunks": 4, "memory_options": MemoryOptions(zero=2)}, marks=slow
    ),
]


def ramp(
    corpus: str,
    name: str,
    microbatches: int,
    sizes: dict[str, Any],
    stages: dict[int, int] | None = None,
    dtype: str = "float64",
) -> Plan:
    """A plan with `stages` of fewer microbatches; by default two fewer in the first two steps."""

    def compiled(m: int) -> Plan:
        return plan_of(**{"dp": 1, "pp": 1, **sizes}, name=name, microbatches=m, data=corpus, dtype=dtype)

    return with_rampup(compiled(microbatches), stages or {microbatches - 2: 2}, compiled)


@pytest.mark.parametrize(("name", "microbatches", "sizes"), MESHES)
def test_a_ramp_equals_one_process(
    fleet: Fleet, corpus: str, name: str, microbatches: int, sizes: dict[str, Any]
) -> None:
    assert_equals_one_process(fleet, ramp(corpus, name, microbatches, sizes), steps=STEPS)


@slow
@pytest.mark.parametrize("post_validation", [False, True])
def test_a_ramp_resumes_with_the_same_bits(fleet: Fleet, corpus: str, tmp_path: Path, post_validation: bool) -> None:
    sizes = {"dp": 2, "pp": 2, "post_validation": post_validation}
    assert_repeatable(fleet, ramp(corpus, "zb-h2", 6, sizes, {2: 1, 4: 2}, "float32"), tmp_path)


@slow
def test_a_ramp_has_the_bits_of_a_run_whose_batch_size_is_changed_by_hand(
    fleet: Fleet, corpus: str, tmp_path: Path
) -> None:
    plan = ramp(corpus, "1f1b", 6, {"dp": 2, "pp": 2}, {2: 3}, "float32")
    small = plan.with_program(1)
    assert small.batch.sizes.rampup == () and small.batch.global_batch_size == 8
    once = fleet.run(plan, [(0, 5)])
    by_hand = save_and_resume(fleet, plan, checkpoint.folder_of(tmp_path, 3), 3, [(3, 2)], before=small)
    for each, other in zip(once, by_hand, strict=True):
        assert same_bits(each.state, other.state)
        found = [(r.losses, r.grad_norm) for r in each.results[3:]]
        assert found == [(r.losses, r.grad_norm) for r in other.results]
    assert [r.program for r in once[0].results] == [1, 1, 1, 0, 0]
