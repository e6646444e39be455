"""Offloaded units: one process's result, the bits of a run without, and the host and device bytes of the plan."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from bits import same_bits
from exactness import assert_equals_one_process
from plans import MODEL, plan_of
from small_models import FAMILIES, MOE

from pentad.orchestrator.activations.allocations import piece_of
from pentad.schedules.ir.instruction import Op, instructions_of
from pentad.schedules.spec.plan import Plan
from pentad.schedules.spec.schedule_spec import MemoryOptions

pytestmark = pytest.mark.timeout(60)
slow = pytest.mark.slow
SCHEDULES: dict[str, dict[str, Any]] = {
    "1f1b": {}, "zb-h2": {}, "zb-v": {}, "dualpipe": {}, "dualpipev": {}, "looped-bfs": {"chunks": 2},
}  # fmt: skip
MODELS = {"dense": MODEL, "experts": MOE, "tied": FAMILIES["qwen3"]}
MODES = ("none", "selective", "attention", "full")
CUTS = list(product((1, 2, None), (0.0, 0.3, 1.0)))  # layers of a unit, offloaded share
ALWAYS = [("1f1b", 3, "none", 1, 0.3, "dense"), ("dualpipev", 1, "attention", 1, 1.0, "dense")]
ALWAYS += [("zb-h2", 2, "full", 2, 1.0, "experts")]
# Every combination of schedule, ZeRO stage, mode and model with every share; a schedule and two of the others with
# every number of layers; a schedule and one of the others with every pair of layers and share.
MATRIX = [
    (name, zero, mode, *CUTS[(number + other) % len(CUTS)], model)
    for number, (name, zero, mode, model) in enumerate(product(SCHEDULES, (1, 2, 3), MODES, MODELS))
    for other in (0, 4, 8)
]
# Every combination of schedule, ZeRO stage and model, saving the first rows of what mode attention recomputes.
ROWS = [
    (name, zero, fraction, *CUTS[(number + other) % len(CUTS)], model)
    for number, (name, zero, model) in enumerate(product(SCHEDULES, (1, 2, 3), MODELS))
    for other, fraction in ((0, 0.3), (4, 0.7), (8, 0.5))
]
ROWS_ALWAYS = [("zb-v", 3, 0.5, 1, 0.3, "dense"), ("dualpipe", 1, 0.7, 1, 1.0, "experts")]
ROW_CASES = [*ROWS_ALWAYS, *(pytest.param(*case, marks=slow) for case in ROWS if case not in ROWS_ALWAYS)]
CASES = [*ALWAYS, *(pytest.param(*case, marks=slow) for case in MATRIX if case not in ALWAYS)]


def offloading(
    corpus: str, name: str, zero: int, mode: str, units: int | None, alpha: float, model: str, rows: float = 1.0
) -> Plan:
    given: dict[str, Any] = {"recompute": mode, "unit_layers": units, "offload": alpha, "model": MODELS[model]}
    given["recompute_fraction"] = rows
    return plan_of(name, 2, 2, 4, corpus, memory_options=MemoryOptions(zero=zero), **given, **SCHEDULES[name])


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("name", "zero", "mode", "units", "alpha", "model"), CASES)
def test_offloaded_units_equal_one_process(fleet, corpus, name, zero, mode, units, alpha, model) -> None:
    plan = offloading(corpus, name, zero, mode, units, alpha, model)
    ops = {part.op for stream in plan.program.streams for part in instructions_of(stream)}
    assert units is None or (Op.OFFLOAD in ops) == (alpha > 0)
    assert (Op.RECOMPUTE in ops) == (mode != "none")
    assert_equals_one_process(fleet, plan)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("name", "zero", "rows", "units", "alpha", "model"), ROW_CASES)
def test_units_that_recompute_some_rows_equal_one_process(fleet, corpus, name, zero, rows, units, alpha, model) -> None:
    """The other rows are saved, on the device or the host."""
    plan = offloading(corpus, name, zero, "attention", units, alpha, model, rows)
    assert piece_of(plan).saved_rows == (4 if rows == 0.7 else 8)  # of 16
    ops = {part.op for stream in plan.program.streams for part in instructions_of(stream)}
    assert Op.RECOMPUTE in ops and (units is None or (Op.OFFLOAD in ops) == (alpha > 0))
    assert_equals_one_process(fleet, plan)


@slow
@pytest.mark.parametrize("alpha", [0.1, 0.3, 0.6, 1.0])
@pytest.mark.parametrize("mode", ["none", "attention"])
def test_experts_that_exchange_tokens_equal_one_process(fleet, corpus, mode, alpha) -> None:
    """Each microbatch saves a different number of rows."""
    given: dict[str, Any] = {"model": MOE, "ep": 2, "unit_layers": 1, "recompute": mode, "offload": alpha}
    assert_equals_one_process(fleet, plan_of("dualpipe", 1, 2, 4, corpus, **given))


@pytest.mark.parametrize(
    ("name", "mode"),
    [("1f1b", "none"), *(pytest.param(*each, marks=slow) for each in product(SCHEDULES, ("none", "attention")))],
)
def test_the_length_of_a_prefetch_changes_no_bit(fleet, corpus, name, mode) -> None:
    runs = []
    for prefetch in (1, 2, 4):
        options = MemoryOptions(zero=1, offload_prefetch=prefetch)
        given: dict[str, Any] = {"recompute": mode, "unit_layers": 1, "offload": 0.6, **SCHEDULES[name]}
        plan = plan_of(name, 2, 2, 4, corpus, memory_options=options, **given)
        assert Op.OFFLOAD in {part.op for stream in plan.program.streams for part in instructions_of(stream)}
        runs.append(fleet.run(plan, [(0, 2)]))
    for first, *others in zip(*runs, strict=True):
        assert all(same_bits(first.state, other.state) for other in others)


@pytest.mark.parametrize("mode", ["none", *(pytest.param(mode, marks=slow) for mode in MODES[1:])])
def test_offloading_changes_no_bit(fleet, corpus, mode) -> None:
    cases = [(alpha, rows) for rows in ((1.0, 0.5) if mode == "attention" else (1.0,)) for alpha in (0.0, 0.3, 1.0)]
    runs = [
        fleet.run(offloading(corpus, "zb-h2", 2, mode, 1, alpha, "dense", rows), [(0, 1), (1, 1)])
        for alpha, rows in cases
    ]
    for plain, *others in zip(*runs, strict=True):
        for other in others:
            assert same_bits(plain.state, other.state)
            assert all(same_bits(*pair) for pair in zip(plain.gradients, other.gradients, strict=True))
            assert [each.losses for each in plain.results] == [each.losses for each in other.results]
