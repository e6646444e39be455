"""Law 1 for custom models: any schedule on any mesh gives what one process gives, in float64."""

from __future__ import annotations

from typing import Any

import pytest
from custom_models import custom_model, reference
from fleet import Fleet, assemble, losses_of
from plans import STEPS, is_close, plan_of

from pentad.schedules.spec.model import ModelSpec
from pentad.schedules.spec.plan import Plan
from pentad.schedules.spec.schedule_spec import MemoryOptions

CASES = [
    ("gpipe", 1, 1, 2),
    ("1f1b", 2, 2, 2),
    ("1f1b", 1, 4, 4),
    ("zb-h1", 1, 2, 4),
    ("zb-h2", 2, 2, 2),
    ("zb-v", 1, 2, 4),
    ("interleaved", 1, 2, 4),
    ("v-min", 1, 2, 4),
    ("dualpipe", 1, 2, 4),
    ("dualpipev", 1, 2, 4),
]
NAMES = ("gpt", "gpt_dropout", "conv")
SLOW = pytest.mark.slow
FAST = {("gpt", "zb-h1"), ("gpt_dropout", "dualpipe"), ("conv", "zb-v")}


def all_cases() -> list[Any]:
    """All models under all schedules, most of them slow."""
    cases = [(model, *case) for model in NAMES for case in CASES]
    return [pytest.param(*case, marks=[] if case[:2] in FAST else [SLOW]) for case in cases]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ModelSpec]:
    return {name: custom_model(tmp_path_factory.mktemp("custom"), name, layers=4) for name in NAMES}


def check_equals_one_process(fleet: Fleet, plan: Plan) -> None:
    losses, gradients, norms, weights = reference(plan)
    outcomes = fleet.run(plan, [(0, 2), (2, 1)])
    for step in range(STEPS):
        sums = losses_of(outcomes, step).values()
        assert sum(sums) / plan.batch.tokens == pytest.approx(losses[step], rel=1e-10)
        assert all(outcome.results[step].grad_norm == pytest.approx(norms[step], rel=1e-10) for outcome in outcomes)
        for name, gradient in assemble([outcome.gradients[step] for outcome in outcomes], weights).items():
            assert is_close(gradient, gradients[step][name]), f"step {step}: gradient of {name}"
    states = [
        {name.removeprefix("model."): value for name, value in outcome.state.items() if name.startswith("model.")}
        for outcome in outcomes
    ]
    found = assemble(states, weights)
    assert found.keys() == weights.keys()
    for name, weight in weights.items():
        assert is_close(found[name], weight), f"weights of {name}"


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("model", "name", "dp", "pp", "microbatches"), all_cases())
def test_any_schedule_equals_one_process(fleet, corpus, models, model, name, dp, pp, microbatches) -> None:
    check_equals_one_process(fleet, plan_of(name, dp, pp, microbatches, corpus, model=models[model]))


@pytest.mark.slow
@pytest.mark.parametrize("zero", [pytest.param(1, marks=SLOW), pytest.param(2, marks=SLOW), 3])
@pytest.mark.parametrize(
    ("name", "dp", "pp", "microbatches"),
    [("zb-h1", 2, 2, 2), pytest.param("zb-v", 2, 2, 4, marks=SLOW), pytest.param("gpipe", 4, 1, 2, marks=SLOW)],
)
@pytest.mark.parametrize("model", ["gpt_dropout", pytest.param("conv", marks=SLOW)])
def test_zero_equals_one_process(fleet, corpus, models, model, name, dp, pp, microbatches, zero) -> None:
    options = MemoryOptions(zero=zero)
    check_equals_one_process(
        fleet, plan_of(name, dp, pp, microbatches, corpus, model=models[model], memory_options=options)
    )


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize(("recompute", "max_resident"), [("full", None), ("none", 3.0)])
def test_recomputation_and_offload_equal_one_process(fleet, corpus, models, recompute, max_resident) -> None:
    model = models["gpt_dropout"]
    plan = plan_of("1f1b", 1, 4, 4, corpus, model=model, recompute=recompute, max_resident=max_resident)
    check_equals_one_process(fleet, plan)


def test_post_validation_equals_one_process(fleet, corpus, models) -> None:
    check_equals_one_process(fleet, plan_of("zb-h1", 1, 2, 4, corpus, model=models["gpt"], post_validation=True))
