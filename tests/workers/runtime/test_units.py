"""Laws 1 and 4 with stages of several units: one process's result, and the bits of whole stages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from bits import same_bits
from exactness import assert_equals_one_process
from plans import MODEL, STEPS, plan_of
from resume import save_and_resume
from small_models import FAMILIES, HEADS, MOE

from pentad.orchestrator.config.config import load
from pentad.orchestrator.planning.estimate import memory
from pentad.orchestrator.planning.planning import make_plan
from pentad.schedules.spec.schedule_spec import MemoryOptions
from pentad.workers.checkpoint import checkpoint

pytestmark = pytest.mark.timeout(60)
slow = pytest.mark.slow
CLIP = 0.1  # less than the norm of any step
EVERY = MemoryOptions(zero=2, reduce="microbatch")
CASES = [
    pytest.param("1f1b", {"dp": 2, "pp": 2}, 1, MemoryOptions(zero=3, max_gathered=2), {}),
    pytest.param("zb-h2", {"pp": 2, "dp": 2}, 2, MemoryOptions(zero=2), {"recompute": "full"}, marks=slow),
    pytest.param("dualpipe", {"pp": 2, "ep": 2}, 1, MemoryOptions(zero=3), {"model": MOE}, marks=slow),
    pytest.param("dualpipe", {"pp": 2, "dp": 1}, 1, EVERY._replace(zero=3, max_gathered=2), {}),
    pytest.param(
        "zb-v", {"pp": 2, "tp": 2}, 1, MemoryOptions(), {"model": HEADS, "recompute": "selective"}, marks=slow
    ),
    pytest.param("zb-h2", {"pp": 2, "dp": 2}, 1, EVERY._replace(zero=3, max_gathered=3), {}),
    pytest.param("1f1b", {"dp": 2, "ep": 2}, 2, EVERY, {"model": MOE}, marks=slow),
    pytest.param("seq-1f1b", {"pp": 2, "dp": 2}, 1, EVERY, {"model": FAMILIES["qwen3"], "slices": 2}, marks=slow),
]
ORDERS = {"1f1b": {}, "zb-h2": {}, "zb-v": {}, "dualpipe": {}, "dualpipev": {}, "looped-bfs": {"chunks": 2}}
MODELS = {"dense": MODEL, "experts": MOE, "tied": FAMILIES["qwen3"]}
SHARDED = [MemoryOptions(zero=1), MemoryOptions(zero=2), EVERY, MemoryOptions(zero=3)]
SHARDED += [EVERY._replace(zero=3), EVERY._replace(zero=3, max_gathered=2)]
MATRIX = [
    pytest.param(name, {"pp": 2, "dp": 2, **more}, units, options, {"model": model})
    for name, more in ORDERS.items()
    for units in (1, 2, None)
    for options in SHARDED
    for model in MODELS.values()
]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("name", "axes", "unit_layers", "memory_options", "more"), CASES)
def test_units_equal_one_process(fleet, corpus, name, axes, unit_layers, memory_options, more) -> None:
    given = {"dp": 1, "pp": 1, "microbatches": 4, "data": corpus, "memory_options": memory_options, **axes, **more}
    assert_equals_one_process(fleet, plan_of(name, unit_layers=unit_layers, **given), check_bytes=True)


@slow
@pytest.mark.parametrize(("name", "axes", "unit_layers", "memory_options", "more"), MATRIX)
def test_any_units_and_reductions_equal_one_process(
    fleet, corpus, name, axes, unit_layers, memory_options, more
) -> None:
    test_units_equal_one_process(fleet, corpus, name, axes, unit_layers, memory_options, more)


@slow
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_sharded_units_have_the_bits_of_whole_stages(fleet, corpus, zero: int) -> None:
    """In bfloat16, where every step is reduced once: the order of sums is then the same, except in the float64 norm."""
    options = MemoryOptions(zero=zero)
    plans = [
        plan_of("zb-h2", 2, 2, 4, corpus, "bfloat16", unit_layers=units, memory_options=options, clip=CLIP)
        for units in (2, None)
    ]
    units, whole = ([outcome.results for outcome in fleet.run(plan, [(0, 4)])] for plan in plans)
    for some, one in zip(units, whole, strict=True):
        assert [result.losses for result in some] == [result.losses for result in one]
        assert [result.grad_norm for result in some] == pytest.approx([result.grad_norm for result in one], rel=1e-14)


@pytest.mark.parametrize(
    ("name", "recompute"),
    [("zb-h2", "full"), *(pytest.param(name, "none", marks=slow) for name in ("zb-v", "dualpipe", "1f1b"))],
)
def test_units_have_the_bits_of_whole_stages(fleet, corpus, name, recompute) -> None:
    """Even with clipped gradients: the factor has the same float32 digits."""
    runs = []
    for unit_layers in (None, 1, 2):
        given = {"dtype": "float32", "clip": CLIP, "recompute": recompute, "unit_layers": unit_layers}
        runs.append(fleet.run(plan_of(name, 1, 2, 4, corpus, **given), [(0, STEPS)]))
    for whole, *others in zip(*runs, strict=True):
        for other in others:
            assert [each.losses for each in whole.results] == [each.losses for each in other.results]
            assert min(each.grad_norm for each in whole.results) > CLIP
            assert same_bits(whole.state, other.state)


SAVINGS: dict[str, dict[str, Any]] = {
    "ZeRO-1": {"memory_options": MemoryOptions(zero=1)},
    "ZeRO-3, two units": {"memory_options": MemoryOptions(zero=3, max_gathered=2), "unit_layers": 1},
    "attention": {"recompute": "attention", "unit_layers": 1},
    "ZeRO-2, full": {"memory_options": MemoryOptions(zero=2), "recompute": "full", "unit_layers": 1},
    "offload": {"offload": 0.3, "recompute": "attention", "unit_layers": 2},
}


@pytest.mark.parametrize("saving", ["ZeRO-3, two units", *(pytest.param(each, marks=slow) for each in SAVINGS)])
@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=slow)])
def test_no_saving_changes_a_bit(fleet, corpus, saving: str, dtype: str) -> None:
    """Compared with whole stages, one reduction a step and two replicas. A saving brings its own units."""
    plain_and_saved: list[dict[str, Any]] = [{}, SAVINGS[saving]]
    plans = [plan_of("1f1b", 2, 2, 4, corpus, dtype, clip=CLIP, **more) for more in plain_and_saved]
    plain, saved = (fleet.run(plan, [(0, STEPS)])[0] for plan in plans)
    assert [each.losses for each in plain.results] == [each.losses for each in saved.results]
    assert saved.results[-1].grad_norm == pytest.approx(plain.results[-1].grad_norm, rel=1e-14)


@pytest.mark.parametrize(("pp", "dp"), [(1, 2), (1, 4), (2, 2)])
@pytest.mark.parametrize("zero", [2, 3])
def test_zero_divides_all_but_a_few_units(zero: int, pp: int, dp: int) -> None:
    """The planned bytes of a Llama: shards, and the weights and gradients of two units, possibly with the weights of
    the small units at both ends."""
    sizes = ["model.hidden=512", "model.heads=8", "model.ffn=1536", "model.layers=16", "model.vocab=512"]
    axes = [f"mesh.pp={pp}", f"mesh.dp={dp}", "schedule.name=1f1b", "schedule.microbatches=4", f"zero.stage={zero}"]
    more = ["memory.unit_layers=1"]
    plan = make_plan(load(None, [*sizes, *axes, *more, "batch.global_batch_size=16"]), "cpu")
    assert plan.program.units == ((18,) if pp == 1 else (9, 9))
    for rank in range(plan.mesh.size):
        parts = [plan.size(shard) for shard in plan.param_shards_of(rank)]
        largest, held, total = sorted(parts, reverse=True), memory(plan, rank), sum(parts)
        assert held["optimizer"] == 2 * 4 * total / dp
        assert held["gradients"] == 4 * (total / dp + sum(largest[:2]))
        gathered = held["parameters"] / 4 - (total / dp if zero == 3 else 0)
        assert (0 <= gathered - sum(largest[:2]) <= sum(largest[-2:])) if zero == 3 else gathered == total


@pytest.mark.slow
def test_a_checkpoint_resumes_with_other_units(fleet, corpus, tmp_path: Path) -> None:
    """Bit-identical: the sum of two ranks has one order only."""
    ends, options = [], MemoryOptions(zero=3)
    for folder, units in enumerate(((1, 3), (None, None))):
        plans = [
            plan_of("1f1b", 2, 1, 4, corpus, "float32", unit_layers=each, memory_options=options, clip=CLIP)
            for each in units
        ]
        at = checkpoint.folder_of(tmp_path / str(folder), 2)
        ends.append(save_and_resume(fleet, plans[1], at, 2, [(2, 2)], before=plans[0]))
    for some, one in zip(*ends, strict=True):
        assert [r.losses for r in some.results] == [r.losses for r in one.results]
