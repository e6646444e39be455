"""RECOMPUTE, OFFLOAD and RELOAD on GPUs: the same bits as without, and the memory that the estimate says."""

from __future__ import annotations

from dataclasses import replace

import pytest
from determinism_cases import same_bits
from fleet import Fleet
from gpus import num_places
from plans import plan_of

from pentad.orchestrator.planning.activation_peaks import activation_peaks
from pentad.schedules.spec.model import ModelSpec
from pentad.schedules.spec.plan import BatchSpec, Plan

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]
# Its activations outweigh whatever else is there for a moment, such as indices of first values.
WIDE = ModelSpec(layers=8, hidden=512, heads=4, kv_heads=2, ffn=1536, vocab=300)
LESS = [("full", None), ("selective", None), ("none", 2.0)]
SIZES = [("gpipe", 5, None), ("zb-h2", 6, None), ("1f1b", 5, None), ("seq-1f1b", 3, 2), ("dualpipe", 8, None)]
CASES = [(*size, *less) for size in SIZES for less in LESS if size[0] in ("gpipe", "zb-h2") or not less[1]]


def on_gpu(plan: Plan, transport: str, dtype: str) -> Plan:
    if num_places() < plan.mesh.size:
        pytest.skip(f"{plan.mesh.size} GPUs are needed")
    return replace(plan, device="cuda", transport=transport, dtype=dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("name", "m", "slices", "mode", "keep"), CASES)
def test_less_memory_changes_no_bit(gpus, corpus, name, m, slices, mode, keep, dtype):
    runs = []
    for less in ({"recompute": mode, "keep": keep}, {}):
        plan = plan_of(name, 1, 2, m, corpus, slices=slices, **less)
        runs.append(gpus.run(on_gpu(plan, "peer", dtype), [(0, 2), (2, 1)]))
    for found, expected in zip(*runs, strict=True):
        assert same_bits(found.state, expected.state)
        assert all(same_bits(*pair) for pair in zip(found.gradients, expected.gradients, strict=True))
        assert [r.losses for r in found.results] == [r.losses for r in expected.results]


def wide(corpus: str, mode: str, keep: float | None, *, deterministic: bool) -> Plan:
    plan = replace(plan_of("gpipe", 1, 1, 6, corpus, recompute=mode, keep=keep), model=WIDE)
    plan = replace(plan, batch=BatchSpec(global_batch_size=12, sequence_length=2048, microbatches=6, replicas=1))
    return on_gpu(replace(plan, deterministic=deterministic), "nccl", "bfloat16")


@pytest.mark.parametrize("deterministic", [True, False])
def test_memory_falls_as_the_estimate_says(corpus: str, deterministic: bool) -> None:
    measured, said = {}, {}
    fewer = LESS if deterministic else LESS[:1]
    for less in [("none", None), *fewer]:
        plan = wide(corpus, *less, deterministic=deterministic)
        fleet = Fleet(1)  # a process of its own: the most that it ever had allocated
        try:
            (outcome,) = fleet.run(plan, [(0, 2)])
        finally:
            fleet.stop()
        measured[less], said[less] = outcome.results[-1].peak_bytes, activation_peaks(plan, 0)[0]
    whole = ("none", None)
    for less in fewer:
        falls = measured[whole] - measured[less]
        assert falls == pytest.approx(said[whole] - said[less], rel=0.03), less
