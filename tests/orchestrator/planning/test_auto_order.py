"""schedule.name=auto: no schedule of the catalogue has a shorter planned time, including reductions and updates."""

from __future__ import annotations

from pathlib import Path

import pytest

from pentad.orchestrator.activations.allocations import piece_of
from pentad.orchestrator.config.config import RunConfig, load
from pentad.orchestrator.planning.estimate import costs_of, simulated_seconds
from pentad.orchestrator.planning.parameter_collectives import gather_seconds, num_mirrors, reduction_seconds
from pentad.orchestrator.planning.planning import make_plan
from pentad.schedules.spec.mesh import Mesh

ROOT = Path(__file__).parents[3]
GPU = ("cluster.gpu=NVIDIA H200", "cluster.device=cuda", "precision.deterministic=false")
KNOWN = ("1f1b", "1f1b-eager", "zb-h1", "zb-h2", "zb-v", "v-half", "dualpipe", "dualpipev", "interleaved-zb")
JOBS = {
    "1B pp4": ("llama-1b",),
    "1B dp2 pp2": ("llama-1b", "mesh.dp=2", "mesh.pp=2", "schedule.microbatches=8"),
    "8B dp2 pp2 ZeRO-1": ("llama-8b", "mesh.tp=1", "mesh.dp=2", "mesh.pp=2", "zero.stage=1", "schedule.microbatches=4"),
}


def planned(job: str, *words: str) -> RunConfig:
    return load(ROOT / "deploy" / "jobs" / f"{job}.yaml", [*GPU, *words])


def seconds(job: str, *words: str) -> float:
    return simulated_seconds(make_plan(planned(job, *words), "cuda", proved=False))


@pytest.mark.parametrize(
    "words",
    [pytest.param(words, marks=[pytest.mark.slow] * (job == "1B pp4")) for job, words in JOBS.items()],
    ids=list(JOBS),
)
def test_no_schedule_of_the_catalogue_has_a_shorter_step(words):
    found = seconds(*words, "schedule.name=auto")
    others = {name: seconds(*words, f"schedule.name={name}") for name in KNOWN}
    assert found <= min(others.values()) * (1 + 1e-9), others


def test_mirrors_reduce_and_gather_what_as_many_replicas_would():
    """Two ranks of a host hold a stage, whether along dp or as mirrors."""
    plan = make_plan(planned("llama-1b", "mesh.pp=2", "schedule.name=dualpipe"), "cuda", proved=False)
    assert num_mirrors(plan.program.placement) == 2
    rates, span = plan.rates, plan.layers[0]
    assert rates is not None
    for zero in (0, 1, 3):
        alone, two = (Mesh(pp=2), Mesh(dp=2))
        for bf16 in (False, True):
            given = plan.model, None, span
            mirrored = reduction_seconds(*given, alone, rates, zero, bf16=bf16, mirrors=2)
            assert mirrored == reduction_seconds(*given, two, rates, zero, bf16=bf16) > 0
        pieces = [piece_of(plan)._replace(mesh=mesh) for mesh in (alone, two)]
        assert gather_seconds(*given, pieces[0], rates, zero, 2) == gather_seconds(*given, pieces[1], rates, zero) > 0


def test_a_plan_with_mirrors_counts_their_reductions_and_one_without_does_not():
    mirrored, single = (
        costs_of(make_plan(planned("llama-1b", f"schedule.name={name}"), "cuda", proved=False))
        for name in ("dualpipe", "zb-h2")
    )
    latency = max(single.reduce)
    assert min(mirrored.reduce) > 10 * latency
