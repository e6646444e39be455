"""Law 1 for models of a user's own: any schedule on any mesh gives what one process gives, in float64."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from custom_models import made, reference
from fleet import Fleet, assemble, losses_of
from plans import STEPS, is_close, plan_of
from reference_model import Trained

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
NAMES = ("gpt", "dropping", "made")
SLOW = pytest.mark.slow
CHOSEN = {("gpt", "zb-h1"), ("dropping", "dualpipe"), ("made", "zb-v"), ("made", "1f1b")}


def some() -> list[Any]:
    """All models under all schedules, most of them slow."""
    every = [(model, *case) for model in NAMES for case in CASES]
    return [pytest.param(*one, marks=[] if one[:2] in CHOSEN else [SLOW]) for one in every]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ModelSpec]:
    return {name: made(tmp_path_factory.mktemp("own"), name, layers=4) for name in NAMES}


@cache
def expected(plan: Plan) -> Trained:
    return reference(plan)


def equals_one_process(fleet: Fleet, plan: Plan, save: Path | None = None) -> None:
    losses, gradients, norms, weights = reference(plan)
    outcomes = fleet.run(plan, [(0, 2), (2, 1)])
    for step in range(STEPS):
        sums = losses_of(outcomes, step).values()
        assert sum(sums) / plan.batch.tokens == pytest.approx(losses[step], rel=1e-10)
        assert all(outcome.results[step].grad_norm == pytest.approx(norms[step], rel=1e-10) for outcome in outcomes)
        for parameter, gradient in assemble([o.gradients[step] for o in outcomes], weights).items():
            assert is_close(gradient, gradients[step][parameter]), f"step {step}: gradient of {parameter}"
    states = [
        {name.removeprefix("model."): value for name, value in outcome.state.items() if name.startswith("model.")}
        for outcome in outcomes
    ]
    found = assemble(states, weights)
    assert found.keys() == weights.keys()
    for parameter, weight in weights.items():
        assert is_close(found[parameter], weight), f"weights of {parameter}"


@pytest.mark.parametrize(("model", "name", "dp", "pp", "microbatches"), some())
def test_any_schedule_equals_one_process(fleet, corpus, models, model, name, dp, pp, microbatches) -> None:
    equals_one_process(fleet, plan_of(name, dp, pp, microbatches, corpus, model=models[model]))


@pytest.mark.parametrize("zero", [pytest.param(1, marks=SLOW), pytest.param(2, marks=SLOW), 3])
@pytest.mark.parametrize(
    ("name", "dp", "pp", "microbatches"),
    [("zb-h1", 2, 2, 2), pytest.param("zb-v", 2, 2, 4, marks=SLOW), pytest.param("gpipe", 4, 1, 2, marks=SLOW)],
)
@pytest.mark.parametrize("model", ["dropping", pytest.param("made", marks=SLOW)])
def test_shards_of_zero_equal_one_process(fleet, corpus, models, model, name, dp, pp, microbatches, zero) -> None:
    plan = plan_of(name, dp, pp, microbatches, corpus, model=models[model], memory_options=MemoryOptions(zero=zero))
    equals_one_process(fleet, plan)


@pytest.mark.parametrize(("recompute", "keep"), [("full", None), ("none", 3.0)])
def test_what_is_made_again_or_waits_on_the_host_equals_one_process(fleet, corpus, models, recompute, keep) -> None:
    plan = plan_of("1f1b", 1, 4, 4, corpus, model=models["dropping"], recompute=recompute, max_resident=keep)
    equals_one_process(fleet, plan)


def test_a_step_that_is_validated_later_equals_one_process(fleet, corpus, models) -> None:
    equals_one_process(fleet, plan_of("zb-h1", 1, 2, 4, corpus, model=models["gpt"], post_validation=True))
