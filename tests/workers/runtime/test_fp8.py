"""Products in 8 bits, emulated: any mesh and schedule gives what one process gives under the same recipe."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from bits import same_bits
from exactness import assert_equals_one_process
from fp8_plans import (
    BLOCK,
    DELAYED,
    EXPERTS,
    LATENT,
    MIXTURE,
    PREDICTING,
    ROW,
    SHARED,
    TENSOR,
    TIED,
    WIDE,
    WIDE_EXPERTS,
    ZERO_3,
    fp8_plan,
)
from resume import assert_repeatable

from pentad.schedules.spec.model import Fp8Spec
from pentad.workers.linear.fp8_sample import cosines, merged

CASES: list[tuple[Fp8Spec, str, dict[str, Any]]] = [
    (BLOCK, "zb-h2", {"pp": 2, "layers": 2}),
    (TENSOR, "1f1b", {"tp": 2, "layers": 1}),
    (TENSOR, "1f1b", {"tp": 2, "cp": 2}),
    *((spec, "dualpipev", {"pp": 2, "tp": 2}) for spec in (BLOCK, TENSOR, ROW)),
    *((spec, "1f1b", {"cp": 2, "tp": 2}) for spec in (BLOCK, ROW)),
    *(
        (spec, "zb-v", {"pp": 2, "recompute": recompute})
        for spec, recompute in ((BLOCK, "selective"), (TENSOR, "full"))
    ),
    *((spec, "zb-h1", {"pp": 2, "recompute": "attention"}) for spec in (BLOCK, TENSOR, ROW)),
    *((spec, "1f1b", {"tp": 2, "recompute": "core_attn,attn_proj"}) for spec in (BLOCK, TENSOR, ROW)),
    *((spec, "1f1b", {"pp": 2, "dp": 2, **ZERO_3}) for spec in (BLOCK, TENSOR)),
    (replace(BLOCK, skip_first=1, skip_last=1), "interleaved", {"pp": 2}),
    (BLOCK, "zb-h1", {"pp": 2, "ep": 2, "model": MIXTURE}),
    (EXPERTS, "1f1b", {"ep": 2, "layers": 2, "model": WIDE_EXPERTS}),
    (EXPERTS, "zb-h1", {"pp": 2, "ep": 2, "recompute": "selective", "model": WIDE_EXPERTS}),
    (replace(EXPERTS, gradients="e5m2"), "zb-v", {"pp": 2, "tp": 2, "recompute": "full", "model": WIDE_EXPERTS}),
    (EXPERTS, "1f1b", {"pp": 2, "dp": 2, "model": WIDE_EXPERTS, **ZERO_3}),
    (replace(BLOCK, shared_experts=True), "zb-h1", {"pp": 2, "model": SHARED, "recompute": "moe"}),
    (replace(TENSOR, shared_experts=True), "1f1b", {"tp": 2, "layers": 2, "model": SHARED}),
    (replace(ROW, shared_experts=True), "1f1b", {"ep": 2, "layers": 2, "model": SHARED}),
    (replace(EXPERTS, shared_experts=True), "1f1b", {"cp": 2, "layers": 2, "model": SHARED}),
    (BLOCK, "dualpipev", {"pp": 2, "tp": 2, "model": LATENT}),
    *((spec, "1f1b", {"tp": 2, "layers": 2, "model": LATENT}) for spec in (TENSOR, ROW)),
    (BLOCK, "zb-h1", {"pp": 2, "offload": 0.5}),
    (TENSOR, "1f1b", {"pp": 2, "max_resident": 2.0, "recompute": "mlp"}),
    (replace(BLOCK, power_of_two=True, gradients="e5m2"), "zb-h2", {"pp": 2, "post_validation": True}),
    (DELAYED, "1f1b", {"tp": 2, "cp": 2, "layers": 2}),
    (DELAYED, "zb-h2", {"pp": 2, "post_validation": True}),
    (DELAYED, "zb-h2", {"pp": 2, "dp": 2, "post_validation": True}),
    (DELAYED, "dualpipev", {"pp": 2, "tp": 2}),
    (DELAYED, "dualpipe", {"pp": 2, "microbatches": 4, "recompute": "full"}),
    (DELAYED, "1f1b", {"pp": 2, "dp": 2, **ZERO_3}),
    (DELAYED, "zb-h1", {"pp": 2, "offload": 0.5}),
    (DELAYED, "zb-h1", {"pp": 2, "recompute": "attention"}),
    (replace(DELAYED, shared_experts=True, power_of_two=True), "1f1b", {"ep": 2, "layers": 2, "model": SHARED}),
    (DELAYED, "1f1b", {"tp": 2, "layers": 2, "model": LATENT}),
    (replace(BLOCK, head=True), "zb-h2", {"pp": 2, "tp": 2, "layers": 2, "model": WIDE}),
    (replace(TENSOR, head=True), "1f1b", {"tp": 2, "cp": 2, "layers": 2, "model": TIED}),
    (replace(ROW, head=True), "dualpipev", {"pp": 2, "tp": 2, "model": WIDE}),
    (replace(ROW, head=True), "1f1b", {"pp": 2, "cp": 2, "layers": 2, "model": TIED}),
    (replace(DELAYED, head=True), "zb-h2", {"pp": 2, "post_validation": True, "layers": 2, "model": WIDE}),
    (replace(DELAYED, head=True), "1f1b", {"tp": 2, "layers": 2, "model": PREDICTING}),
    (replace(BLOCK, head=True), "1f1b", {"dp": 2, "layers": 2, "model": WIDE, "unit_layers": 1, **ZERO_3}),
    (replace(TENSOR, head=True), "zb-v", {"pp": 2, "recompute": "full", "model": WIDE}),
]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("spec", "name", "sizes"), [pytest.param(*case, marks=[pytest.mark.slow] * (i > 1)) for i, case in enumerate(CASES)]
)
def test_any_mesh_equals_one_process_in_8_bits(fleet, corpus, spec, name, sizes):
    assert_equals_one_process(fleet, fp8_plan(spec, name, sizes, corpus))


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"ep": 2}, {"ep": 2, "tp": 2}, {"ep": 2, "cp": 2}])
@pytest.mark.parametrize("slots", [64, 256])
def test_tokens_travel_in_slots_in_8_bits(fleet, corpus, sizes, slots):
    """With too few slots, steps are run again until there are enough; unused slots hold arbitrary values."""
    plan = fp8_plan(EXPERTS, "1f1b", {"layers": 2, "model": WIDE_EXPERTS, **sizes}, corpus)
    assert_equals_one_process(fleet, replace(plan, expert_slots=slots))


@pytest.mark.slow
@pytest.mark.parametrize("spec", [BLOCK, TENSOR, ROW])
@pytest.mark.parametrize(("name", "sizes"), [("zb-h2", {"pp": 2, "tp": 2}), ("1f1b", {"dp": 2, "pp": 2, **ZERO_3})])
def test_repeated_and_resumed_runs_in_8_bits_are_bit_identical(fleet, corpus, tmp_path, spec, name, sizes):
    assert_repeatable(fleet, replace(fp8_plan(spec, name, sizes, corpus), dtype="float32"), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"pp": 2, "ep": 2}, {"dp": 2, "ep": 2, **ZERO_3}])
def test_repeated_and_resumed_runs_of_experts_in_8_bits_are_bit_identical(fleet, corpus, tmp_path, sizes):
    plan = fp8_plan(EXPERTS, "zb-h1" if "pp" in sizes else "1f1b", {"model": WIDE_EXPERTS, **sizes}, corpus)
    assert_repeatable(fleet, replace(plan, dtype="float32"), tmp_path)


@pytest.mark.slow
def test_losses_in_8_bits_stay_close_to_those_of_the_compute_dtype(fleet, corpus):
    """Over 16 steps at a high learning rate, in which the loss falls by more than a tenth."""
    plan = replace(fp8_plan(BLOCK, "zb-h2", {"pp": 2}, corpus), dtype="float32")
    runs = (fleet.run(replace(plan, fp8=spec), [(0, 16)])[-1].results for spec in (None, BLOCK, TENSOR, ROW))
    want, *found = ([sum(source.loss for source in result.sources) for result in run] for run in runs)
    assert want[-1] < 0.9 * want[0]
    for losses in found:
        assert losses != want
        assert losses == pytest.approx(want, rel=3e-2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "name", "sizes"),
    [
        (BLOCK, "1f1b", {"tp": 2, "layers": 1}),
        pytest.param(TENSOR, "zb-h2", {"pp": 2, "tp": 2, "recompute": "selective"}, marks=pytest.mark.slow),
        pytest.param(ROW, "dualpipev", {"pp": 2, "cp": 2}, marks=pytest.mark.slow),
        pytest.param(replace(DELAYED, head=True), "1f1b", {"pp": 2, "tp": 2, "model": WIDE}, marks=pytest.mark.slow),
    ],
)
def test_samples_of_operands_are_those_of_one_process(fleet, corpus, spec, name, sizes):
    """In every second step: maxima, and the shares of values that saturate or underflow."""
    plan = fp8_plan(replace(spec, sample_every=2), name, sizes, corpus)
    one: dict[str, Any] = {"layers": plan.model.layers, "model": plan.model}
    alone = fp8_plan(replace(spec, sample_every=2), "1f1b", one, corpus)
    outcomes, (want,) = fleet.run(plan, [(0, 3)]), fleet.run(replace(alone, batch=plan.batch), [(0, 3)])
    for step in range(3):
        found = merged(each for outcome in outcomes for each in outcome.results[step].fp8)
        single = merged(want.results[step].fp8)
        assert found.keys() == single.keys() and len(found) == (12 * plan.model.layers + 3 * spec.head) * (
            step % 2 == 0
        )
        for key, each in found.items():
            assert each.amax == pytest.approx(single[key].amax, rel=1e-6)
            for count in ("saturated", "underflowed"):
                share = getattr(each, count) / each.values
                assert share == pytest.approx(getattr(single[key], count) / single[key].values, abs=1e-6)


COMPARED: list[tuple[Fp8Spec, str, dict[str, Any]]] = [
    (BLOCK, "1f1b", {"layers": 1, "microbatches": 1}),
    (BLOCK, "1f1b", {"pp": 2, "layers": 2}),
    (TENSOR, "zb-h2", {"pp": 2, "layers": 2, "post_validation": True}),
    (ROW, "1f1b", {"tp": 2, "layers": 1, "recompute": "selective"}),
    (BLOCK, "1f1b", {"dp": 2, "layers": 1, **ZERO_3}),
    (BLOCK, "1f1b", {"dp": 4, "layers": 1, "zero_shards": 2, **ZERO_3}),
    (EXPERTS, "zb-h1", {"pp": 2, "ep": 2, "model": WIDE_EXPERTS}),
    (replace(DELAYED, head=True), "zb-h2", {"pp": 2, "layers": 2, "post_validation": True, "model": WIDE}),
]


@pytest.mark.parametrize(
    ("spec", "name", "sizes"),
    [pytest.param(*case, marks=[pytest.mark.slow] * (i > 0)) for i, case in enumerate(COMPARED)],
)
def test_comparing_gradients_changes_no_bit_and_gives_the_cosines_of_one_process(fleet, corpus, spec, name, sizes):
    """Gradients are compared in every second step."""
    spec = replace(spec, compare_every=2)
    plan = fp8_plan(spec, name, sizes, corpus)
    microbatches = plan.batch.microbatches * plan.batch.replicas
    alone = {"layers": plan.model.layers, "model": plan.model, "microbatches": microbatches}
    without = fleet.run(replace(plan, fp8=replace(spec, compare_every=0)), [(0, 3)])
    outcomes = fleet.run(plan, [(0, 1), (1, 2)])
    single = fp8_plan(spec, "1f1b", alone, corpus)
    length = plan.batch.sequence_length
    (want,) = fleet.run(replace(single, batch=replace(single.batch, sequence_length=length)), [(0, 3)])
    for a, b in zip(outcomes, without, strict=True):
        assert same_bits(a.state, b.state)
        assert [(r.losses, r.grad_norm) for r in a.results] == [(r.losses, r.grad_norm) for r in b.results]
    for step in range(3):
        found = cosines(each for outcome in outcomes for each in outcome.results[step].fp8_gradients)
        assert found == pytest.approx(cosines(want.results[step].fp8_gradients), rel=1e-9)
        assert bool(found) == (step % 2 == 0) and all(each < 1 - 1e-9 for each in found.values())
        assert step or min(found.values()) > 0.5  # two steps on, the gradients of a model this small may be noise
