"""What test_exactness.py shares with other tests."""

from __future__ import annotations

import pytest
from fleet import Fleet, losses_of
from plans import STEPS, close, reference

from pentad.schedules.spec.plan import Plan


def equals_one_process(fleet: Fleet, plan: Plan) -> None:
    losses, gradients, norms, weights = reference(plan)
    outcomes = fleet.run(plan, [(0, 2), (2, 1)])
    for step in range(STEPS):
        sums = losses_of(outcomes, step).values()
        assert len(sums) == plan.mesh.dp * plan.batch.microbatches
        assert sum(sums) / plan.batch.tokens == pytest.approx(losses[step], rel=1e-10)
        assert {name for outcome in outcomes for name in outcome.gradients[step]} == set(weights)
        for outcome in outcomes:
            assert outcome.results[step].grad_norm == pytest.approx(norms[step], rel=1e-10)
            for parameter, gradient in outcome.gradients[step].items():
                assert close(gradient, gradients[step][parameter]), f"step {step}: gradient of {parameter}"
    seen = set()
    for outcome in outcomes:
        for parameter, weight in weights.items():
            if f"model.{parameter}" in outcome.state:
                seen.add(parameter)
                assert close(outcome.state[f"model.{parameter}"], weight), f"weights of {parameter}"
    assert seen == set(weights)
