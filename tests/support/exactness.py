"""The main numerical law: every plan gives the losses, gradients and weights of a single process."""

from __future__ import annotations

import pytest
import torch
from fleet import Call, Fleet, Outcome, assemble, losses_of
from plans import is_close, reference
from reference_model import Trained

from pentad.orchestrator.planning.estimate import memory
from pentad.schedules.spec.plan import Plan
from pentad.workers.data.sources import open_dataset

TIED_COPIES = {"head", "mtp.embedding"}


def assert_equals_one_process(
    fleet: Fleet, plan: Plan, expected: Trained | None = None, *, steps: int = 2, check_bytes: bool = False
) -> list[Outcome]:
    """Runs two steps in one call and a third in another, in float64, and compares them to 1e-10 with `expected`, or
    with the plan's reference for this many `steps`. `check_bytes` also compares buffer sizes with the plan. Returns the
    ranks' outcomes."""
    losses, gradients, norms, weights = expected or reference(plan, steps)
    steps = len(losses)
    calls: list[Call] = [(0, 2), (2, 1)]
    outcomes = fleet.run(plan, calls[: steps - 1])
    for rank, outcome in enumerate(outcomes) if check_bytes else ():
        planned = memory(plan, rank)
        assert outcome.bytes == {kind: planned[kind] for kind in outcome.bytes}
    for step in range(steps):
        sums = losses_of(outcomes, step).values()
        assert len(sums) == plan.batch.replicas * plan.programs[plan.program_of(step)].microbatches
        (sources,) = {outcome.results[step].sources for outcome in outcomes}
        batch = open_dataset(plan.data, plan.batch, plan.model.vocab, plan.seed).digest(step)
        assert {outcome.results[step].samples for outcome in outcomes} == {batch}, "not every sample once"
        assert sum(source.loss for source in sources) == pytest.approx(sum(sums), rel=1e-14)
        assert sum(sums) / sum(source.target_tokens for source in sources) == pytest.approx(losses[step], rel=1e-10)
        assert len({outcome.results[step].grad_norm for outcome in outcomes}) == 1
        assert outcomes[0].results[step].grad_norm == pytest.approx(norms[step], rel=1e-10)
        found = assemble([outcome.gradients[step] for outcome in outcomes], with_tied_copies(weights))
        for copy in found.keys() & TIED_COPIES - weights.keys():
            assert torch.equal(found.pop(copy), found["embedding"])
        assert found.keys() == {name for name in weights if not name.endswith(".bias")}
        for name, gradient in found.items():
            assert is_close(gradient, gradients[step][name]), f"step {step}: gradient of {name}"
    state = assemble([outcome.state for outcome in outcomes], state_like(weights))
    found = {key.removeprefix("model."): value for key, value in state.items() if key.startswith("model.")}
    for copy in found.keys() & TIED_COPIES - weights.keys():
        assert torch.equal(found.pop(copy), found["embedding"])
    assert found.keys() == {name for name in weights if not name.endswith(".bias")}
    for name, weight in found.items():
        assert is_close(weight, weights[name]), f"weights of {name}"
    return outcomes


def with_tied_copies(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Adds the names of the embedding's copies in other stages."""
    found = dict(tensors)
    for embedding in (name for name in tensors if name.endswith("embedding")):
        found |= {embedding.replace("embedding", name): tensors[embedding] for name in TIED_COPIES}
    return found | tensors


def state_like(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors by name with the shapes of weights and optimizer state."""
    kinds = ("model", "optimizer.m", "optimizer.v", "optimizer.momentum")
    return {f"{kind}.{name}": weight for kind in kinds for name, weight in with_tied_copies(weights).items()}
