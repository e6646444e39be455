"""Law 4: the same mesh and seed give the same bits, whether run twice or stopped and resumed."""

from __future__ import annotations

import pytest
import torch
from plans import SHALLOW, is_close, plan_of
from resume import assert_repeatable

from pentad.schedules.spec.schedule_spec import MemoryOptions
from pentad.workers.checkpoint.manifest import Shard, pieces_by_tensor

slow = pytest.mark.slow
SLOW = [("1f1b", 2, 2, 3), ("dualpipe", 1, 4, 8), ("gpipe", 1, 2, 3), ("zb-h1", 1, 4, 5), ("zb-v", 2, 2, 6)]
CASES = [("zb-h2", 2, 2, 4), *(pytest.param(*case, marks=slow) for case in SLOW)]


ZERO = [
    pytest.param("zb-h2", 2, 2, 4, 1, marks=slow),
    pytest.param("interleaved", 2, 2, 4, 3, marks=slow),
    pytest.param("dualpipe", 1, 4, 8, 2, marks=slow),
    ("1f1b", 4, 1, 2, 3),
]


@pytest.mark.parametrize(
    ("name", "dp", "pp", "microbatches", "dtype"),
    [
        ("zb-h2", 2, 2, 4, "float32"),
        ("zb-h1", 1, 2, 3, "bfloat16"),
        pytest.param("zb-h2", 2, 2, 4, "bfloat16", marks=slow),
        *(pytest.param(*case, dtype, marks=slow) for case in SLOW for dtype in ("float32", "bfloat16")),
    ],
)
def test_repeated_and_resumed_runs_are_bit_identical(fleet, corpus, tmp_path, name, dp, pp, microbatches, dtype):
    plan = plan_of(name, dp, pp, microbatches, corpus, dtype, model=SHALLOW)
    assert_repeatable(fleet, plan, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dp", "pp", "microbatches", "zero"), ZERO)
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=slow)])
def test_runs_under_zero_repeat_and_resume_bit_identically(
    fleet, corpus, tmp_path, name, dp, pp, microbatches, zero, dtype
):
    options = MemoryOptions(zero=zero, max_gathered=1 if name == "interleaved" else None)
    assert_repeatable(fleet, plan_of(name, dp, pp, microbatches, corpus, dtype, memory_options=options), tmp_path)


def test_every_tensor_is_saved_once(fleet, corpus, tmp_path):
    plan = plan_of("dualpipe", 1, 4, 8, corpus, model=SHALLOW)
    outcomes = fleet.run(plan, [(0, 1)], save=str(tmp_path / "step-00000001"))
    pieces = pieces_by_tensor([Shard.from_plain(shard) for outcome in outcomes for shard in outcome.shards])
    assert pieces.keys() == {name for outcome in outcomes for name in outcome.state}


@pytest.mark.parametrize(
    ("name", "dp", "pp", "microbatches"),
    [pytest.param("dualpipe", 1, 4, 8, marks=slow), ("dualpipe", 2, 2, 4), pytest.param("zb-h2", 2, 2, 3, marks=slow)],
)
def test_holders_of_a_stage_stay_bit_identical(fleet, corpus, name, dp, pp, microbatches):
    """DualPipe's mirror ranks and dp replicas step with the same reduced gradients."""
    outcomes = fleet.run(plan_of(name, dp, pp, microbatches, corpus, "float32", model=SHALLOW), [(0, 2)])
    for parameter in {n for o in outcomes for n in o.state}:
        copies = [o.state[parameter] for o in outcomes if parameter in o.state]
        assert len(copies) == dp * (2 if name == "dualpipe" else 1)
        assert all(torch.equal(copies[0], other) for other in copies[1:]), parameter


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 3e-2)])
@pytest.mark.parametrize(("name", "dp", "pp", "microbatches"), CASES)
def test_lower_precision_agrees_with_float64(fleet, corpus, name, dp, pp, microbatches, dtype, tolerance):
    narrow = fleet.run(plan_of(name, dp, pp, microbatches, corpus, dtype, model=SHALLOW), [(0, 1)])
    wide = fleet.run(plan_of(name, dp, pp, microbatches, corpus, model=SHALLOW), [(0, 1)])
    for a, b in zip(narrow, wide, strict=True):
        assert a.results[0].losses == pytest.approx(b.results[0].losses, rel=tolerance)
        for parameter, gradient in a.gradients[0].items():
            assert is_close(gradient.double(), b.gradients[0][parameter], tolerance), parameter
        assert {tensor.dtype for tensor in a.state.values()} == {torch.float32}  # law 5
