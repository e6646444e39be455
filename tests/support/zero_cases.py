"""What test_zero.py shares with other tests."""

from __future__ import annotations

import pytest
from fleet import assembled, losses_of
from plans import STEPS, close, reference

from pentad.orchestrator.planning.estimate import memory
from pentad.schedules.spec.plan import Plan


def equals_one_process(fleet, plan: Plan) -> None:
    losses, gradients, norms, weights = reference(plan)
    outcomes = fleet.run(plan, [(0, 2), (2, 1)])
    for rank, outcome in enumerate(outcomes):
        planned = memory(plan, rank)
        assert outcome.bytes == {kind: planned[kind] for kind in outcome.bytes}
    for step in range(STEPS):
        sums = losses_of(outcomes, step).values()
        assert sum(sums) / plan.batch.tokens == pytest.approx(losses[step], rel=1e-10)
        assert len({outcome.results[step].grad_norm for outcome in outcomes}) == 1
        assert outcomes[0].results[step].grad_norm == pytest.approx(norms[step], rel=1e-10)
        found = assembled([outcome.gradients[step] for outcome in outcomes], weights)
        assert found.keys() == weights.keys()
        for name, gradient in found.items():
            assert close(gradient, gradients[step][name]), f"step {step}: gradient of {name}"
    state = {f"{kind}.{name}": w for kind in ("model", "optimizer.m", "optimizer.v") for name, w in weights.items()}
    found = assembled([outcome.state for outcome in outcomes], state)
    for name, weight in weights.items():
        assert close(found[f"model.{name}"], weight), f"weights of {name}"
