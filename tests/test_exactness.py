"""Law 1: any schedule on any mesh gives the loss, the gradients and the weights of one process."""

from __future__ import annotations

import pytest
import torch
from fleet import Fleet
from reference_model import train

from pentad.schedules.compiler import compile_program
from pentad.schedules.mesh import Mesh
from pentad.schedules.plan import BatchShape, ModelShape, OptimizerShape, Plan, split_layers
from pentad.workers.builtin import builtin_corpus
from pentad.workers.corpus import open_corpus
from pentad.workers.samples import microbatch

STEPS = 3
MESHES = [(1, 1), (2, 1), (1, 2), (2, 2), (1, 4)]
MODEL = ModelShape(layers=5, hidden=16, heads=4, kv_heads=2, ffn=24, vocab=300)


def cases() -> list[tuple[str, int, int, int]]:
    """(schedule, dp, pp, microbatches), odd ones and fewer than stages where the schedule allows them."""
    found = []
    for dp, pp in MESHES:
        for name in ("gpipe", "1f1b", "zb-h1", "zb-h2"):
            found += [(name, dp, pp, m) for m in ((1, 3, 8) if pp > 1 else (1, 3))]
        if pp % 2 == 0:
            found += [("dualpipe", dp, pp, m) for m in (2 * pp, 2 * pp + 2)]
    return found


def plan_of(name: str, dp: int, pp: int, microbatches: int, data: str, dtype: str = "float64") -> Plan:
    return Plan(
        name="exact",
        mesh=Mesh(dp=dp, pp=pp),
        program=compile_program(name, pp, microbatches, replicas=dp),
        layers=split_layers(MODEL.layers, pp, head=1.0),
        model=MODEL,
        batch=BatchShape(sequences=2 * dp * microbatches, length=8, microbatches=microbatches, replicas=dp),
        optimizer=OptimizerShape(1e-2, 1e-3, 2, STEPS, 0.9, 0.95, 1e-8, 0.1, clip_norm=0.5),
        data=data,
        seed=7,
        dtype=dtype,
        device="cpu",
        transport="gloo",
    )


@pytest.fixture(scope="module")
def fleet():
    made = Fleet(4)
    yield made
    made.stop()


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return str(builtin_corpus("pydoc", MODEL.vocab, tmp_path_factory.mktemp("cache")))


@pytest.fixture(scope="module")
def expected():
    """Reference runs by number of sequences: the batch does not depend on how a mesh cuts it."""
    return {}


def reference(plan: Plan, expected: dict) -> tuple:
    key = plan.batch.sequences
    if key not in expected:
        corpus, batches = open_corpus(plan.data, False), []
        for step in range(STEPS):
            rows = microbatch(corpus, plan.seed, step, plan.batch.sequences, range(plan.batch.sequences), plan.batch.length)
            batches.append(tuple(map(torch.from_numpy, rows)))
        expected[key] = train(plan, batches)
    return expected[key]


def close(found: torch.Tensor, wanted: torch.Tensor, tolerance: float = 1e-10) -> bool:
    return float((found - wanted).norm()) <= tolerance * float(wanted.norm())


@pytest.mark.parametrize(("name", "dp", "pp", "microbatches"), cases())
def test_any_schedule_on_any_mesh_equals_one_process(fleet, expected, corpus, name, dp, pp, microbatches):
    plan = plan_of(name, dp, pp, microbatches, corpus)
    losses, gradients, norms, weights = reference(plan, expected)
    outcomes = fleet.run(plan, [(0, 2), (2, 1)])
    for step in range(STEPS):
        sums = [loss for outcome in outcomes for loss in outcome.results[step].losses.values()]
        assert len(sums) == dp * microbatches
        assert sum(sums) / plan.batch.tokens == pytest.approx(losses[step], rel=1e-10)
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
