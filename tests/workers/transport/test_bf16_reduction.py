"""Gradients in bfloat16 between ranks: the sum has the bits of rounded terms that one process adds in the order of
ranks, whatever the mesh, the schedule and the ZeRO stage."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from bf16_sums import assert_sums_of_rounded_terms
from bits import assert_same_runs
from fleet import Fleet, assemble, losses_of
from plans import MODEL, SHALLOW, plan_of, reference
from resume import assert_repeatable, run_and_save
from small_models import MOE

from pentad.schedules.spec.plan import Plan
from pentad.schedules.spec.schedule_spec import MemoryOptions
from pentad.workers.transport.bf16_reduction import chunks

slow = pytest.mark.slow
MESHES: list[tuple[str, dict[str, Any]]] = [
    ("1f1b", {"dp": 2, "pp": 1}),
    ("zb-h2", {"dp": 2, "pp": 2}),
    ("gpipe", {"dp": 2, "pp": 1, "ep": 2, "model": MOE}),
    ("1f1b", {"dp": 4, "pp": 1, "unit_layers": 1}),
    ("1f1b", {"dp": 1, "pp": 1, "cp": 2, "unit_layers": 2}),
    ("dualpipe", {"dp": 1, "pp": 2}),
    ("dualpipe", {"dp": 1, "pp": 4}),
    ("dualpipe", {"dp": 2, "pp": 2}),
    ("dualpipev", {"dp": 2, "pp": 2}),
    ("zb-h2", {"dp": 2, "pp": 2, "post_validation": True}),
    ("zb-v", {"dp": 1, "pp": 2, "ep": 2, "model": MOE}),
]
ALWAYS = [(2, 2), (4, 3), (5, 0)]  # mesh and ZeRO stage


def narrow_plan(data: str, name: str, mesh: dict[str, Any], zero: int, dtype: str = "float32") -> Plan:
    options = MemoryOptions(zero=zero, reduce="microbatch" if zero > 1 else "step")
    plan = plan_of(
        name,
        microbatches=2 * max(2, mesh["pp"]),
        data=data,
        dtype=dtype,
        memory_options=options,
        **{"model": SHALLOW} | mesh,
    )
    return replace(plan, bf16_reduce=True)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("number", "zero"),
    [
        pytest.param(number, zero, marks=[] if (number, zero) in ALWAYS else [slow])
        for number in range(len(MESHES))
        for zero in range(4)
    ],
)
def test_a_sum_has_the_bits_of_rounded_terms_added_in_order(fleet: Fleet, corpus: str, number: int, zero: int) -> None:
    plan = narrow_plan(corpus, *MESHES[number], zero)
    assert_sums_of_rounded_terms(plan, [outcome.reductions for outcome in fleet.run(plan, [(0, 2)])])


@pytest.mark.parametrize("zero", [0, *(pytest.param(zero, marks=slow) for zero in (1, 2, 3))])
def test_in_float64_it_is_as_close_to_one_process_as_rounding_allows(fleet: Fleet, corpus: str, zero: int) -> None:
    """Halves of a batch have gradients of about the same size, so their sum is as close as they are: within 2**-8 for
    one rounding of the terms and one of the sum."""
    plan = narrow_plan(corpus, "zb-h2", {"dp": 2, "pp": 2}, zero, "float64")
    outcomes, (mean_losses, gradients, _, weights) = fleet.run(plan, [(0, 1)]), reference(plan)
    assert_sums_of_rounded_terms(plan, [outcome.reductions for outcome in outcomes])
    losses = sum(losses_of(outcomes).values()) / outcomes[0].results[0].sources[0].target_tokens
    assert losses == pytest.approx(mean_losses[0], rel=1e-10), "the forward of the first step has no such sum"
    found = assemble([outcome.gradients[0] for outcome in outcomes], weights)
    for name, gradient in found.items():
        exact = gradients[0][name]
        error = float((gradient - exact).norm() / exact.norm())
        assert 1e-5 < error < 2**-8, name


@pytest.mark.parametrize(
    ("number", "zero"),
    [(0, 2), *(pytest.param(*case, marks=slow) for case in ((1, 0), (2, 3), (3, 2), (6, 1), (9, 2)))],
)
def test_runs_repeat_and_resume_bit_identically(
    fleet: Fleet, corpus: str, tmp_path: Any, number: int, zero: int
) -> None:
    assert_repeatable(fleet, narrow_plan(corpus, *MESHES[number], zero), tmp_path)


@slow
def test_zero_1_and_2_with_one_reduction_a_step_have_the_same_bits(fleet: Fleet, corpus: str) -> None:
    """They differ only in where sums are kept."""
    options = MemoryOptions(zero=1), MemoryOptions(zero=2, reduce="step")
    plans = (plan_of("1f1b", 4, 1, 3, corpus, "float32", memory_options=each, model=SHALLOW) for each in options)
    assert_same_runs(*(fleet.run(replace(plan, bf16_reduce=True), [(0, 3)]) for plan in plans))


@slow
@pytest.mark.parametrize("zero", [1, 3])
def test_a_run_resumes_on_another_mesh(fleet: Fleet, corpus: str, tmp_path: Any, zero: int) -> None:
    """The losses stay those of one process except for rounding."""
    first = narrow_plan(corpus, "dualpipe", {"dp": 1, "pp": 4, "model": MODEL}, 0, "float64")
    run_and_save(fleet, first, 1, tmp_path / "step-00000001")
    second = plan_of("1f1b", 2, 2, 4, corpus, memory_options=MemoryOptions(zero=zero))
    outcomes = fleet.run(replace(second, bf16_reduce=True), [(1, 2)], restore=str(tmp_path / "step-00000001"))
    expected, *_ = reference(first)
    for index, step in enumerate((1, 2)):
        tokens = outcomes[0].results[index].sources[0].target_tokens
        assert sum(losses_of(outcomes, index).values()) / tokens == pytest.approx(expected[step], rel=1e-4)


@pytest.mark.parametrize(("size", "most"), [(1, 1), (64, 64), (1000, 200), (1000, 5000), (4096, 129)])
def test_chunks_are_all_elements_once_in_aligned_steps(size: int, most: int) -> None:
    found = list(chunks(size, most))
    assert [each for span in found for each in range(size)[span]] == list(range(size))
    assert all(span.start % 64 == 0 and span.stop - span.start <= max(64, most) for span in found)
