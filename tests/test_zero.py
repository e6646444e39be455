"""ZeRO (arXiv 1910.02054): shards of the state, one result."""

from __future__ import annotations

import pytest
from fleet import assembled, losses_of
from plans import STEPS, close, plan_of, reference

from pentad.orchestrator.estimate import memory
from pentad.schedules.plan import Plan
from pentad.schedules.shape import Savings

slow = pytest.mark.slow
MESHES = [("1f1b", 2, 2, 3), ("zb-h2", 2, 2, 4), ("zb-v", 2, 2, 5), ("dualpipe", 1, 2, 4), ("dualpipe", 1, 4, 8)]
MESHES += [("dualpipe", 2, 2, 4), ("dualpipev", 2, 2, 5), ("1f1b", 4, 1, 3), ("1f1b", 2, 1, 2), ("zb-v", 2, 1, 3)]
OFTEN = [("zb-h2", 2, 2, 4, 1), ("1f1b", 4, 1, 3, 2), ("dualpipe", 1, 4, 8, 3)]
CHUNKED = [("interleaved", 2, 2, 4, 4, 1), ("looped-bfs", 2, 2, 3, 4, 1), ("looped-bfs", 2, 1, 3, 4, 2),
           ("interleaved", 2, 2, 4, 2, 1), ("interleaved-zb", 2, 2, 4, 2, 2)]  # fmt: skip


def cases() -> list:
    found = [(*mesh, zero) for mesh in MESHES for zero in (1, 2, 3)]
    return [pytest.param(*case, marks=[] if case in OFTEN else [slow]) for case in found]


def few_at_once() -> list:
    found = [(*case, zero) for case in CHUNKED for zero in (2, 3)]
    return [pytest.param(*case, marks=[slow] if index > 1 else []) for index, case in enumerate(found)]


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


@pytest.mark.parametrize(("name", "dp", "pp", "m", "zero"), cases())
def test_shards_on_any_mesh_equal_one_process(fleet, corpus, name, dp, pp, m, zero):
    equals_one_process(fleet, plan_of(name, dp, pp, m, corpus, savings=Savings(zero=zero)))


@pytest.mark.parametrize(("name", "dp", "pp", "m", "chunks", "gathered", "zero"), few_at_once())
def test_stages_that_take_turns_on_buffers_equal_one_process(fleet, corpus, name, dp, pp, m, chunks, gathered, zero):
    savings = Savings(zero=zero, gathered=gathered if zero == 3 else None)
    equals_one_process(fleet, plan_of(name, dp, pp, m, corpus, chunks=chunks, savings=savings))
