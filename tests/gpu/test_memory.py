"""RECOMPUTE, OFFLOAD and RELOAD on GPUs: the same bits as without, and the estimated savings of memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
from bits import same_bits
from fleet import Fleet
from gpus import RANKS_A_GPU, as_is_on_gpu
from plans import plan_of

from pentad.orchestrator.activations.activation_peaks import activation_peaks
from pentad.schedules.spec.batch import BatchSpec
from pentad.schedules.spec.model import ModelSpec
from pentad.schedules.spec.plan import Plan

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120 * RANKS_A_GPU)]
# So large that activations outweigh temporary tensors, such as those of initialization.
LARGE = ModelSpec(layers=8, hidden=512, heads=4, kv_heads=2, ffn=1536, vocab=300)
# recompute, max_resident
SAVINGS = [("full", None), ("attention", None), ("selective", None), ("none", 2.0)]
SAVINGS += [(parts, None) for parts in ("core_attn", "qkv_linear", "attn_proj", "mlp,core_attn,qkv_linear,attn_proj")]
SIZES = [("gpipe", 5, None), ("zb-h2", 6, None), ("1f1b", 5, None), ("seq-1f1b", 3, 2), ("dualpipe", 8, None)]
CASES = [(*size, *saving) for size in SIZES for saving in SAVINGS if size[0] in ("gpipe", "zb-h2") or not saving[1]]


@pytest.mark.sampled(9)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("name", "m", "slices", "recompute", "max_resident"), CASES)
def test_saving_memory_changes_no_bit(gpus, corpus, name, m, slices, recompute, max_resident, dtype):
    runs = []
    for options in ({"recompute": recompute, "max_resident": max_resident}, {}):
        plan = plan_of(name, 1, 2, m, corpus, slices=slices, **options)
        runs.append(gpus.run(as_is_on_gpu(plan, "peer", dtype), [(0, 2), (2, 1)]))
    for found, expected in zip(*runs, strict=True):
        assert same_bits(found.state, expected.state)
        assert all(same_bits(*pair) for pair in zip(found.gradients, expected.gradients, strict=True))
        assert [r.losses for r in found.results] == [r.losses for r in expected.results]


def large_plan(corpus: str, recompute: str, max_resident: float | None, *, deterministic: bool) -> Plan:
    plan = plan_of("gpipe", 1, 1, 6, corpus, recompute=recompute, max_resident=max_resident)
    batch = BatchSpec(global_batch_size=12, sequence_length=2048, microbatches=6, replicas=1)
    return as_is_on_gpu(replace(plan, model=LARGE, batch=batch, deterministic=deterministic), "nccl", "bfloat16")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("deterministic", [True, False])
def test_peak_memory_falls_as_estimated(corpus: str, deterministic: bool) -> None:
    measured, estimated = {}, {}
    memory_options = SAVINGS if deterministic else SAVINGS[:1]
    plain = ("none", None)
    for saving in [plain, *memory_options]:
        plan = large_plan(corpus, *saving, deterministic=deterministic)
        fleet = Fleet(1)  # its process reports the largest allocation since its start
        try:
            (outcome,) = fleet.run(plan, [(0, 2)])
        finally:
            fleet.stop()
        measured[saving], estimated[saving] = outcome.results[-1].peak_bytes, activation_peaks(plan, 0)[0]
    for saving in memory_options:
        saved = measured[plain] - measured[saving]
        assert saved == pytest.approx(estimated[plain] - estimated[saving], rel=0.03), saving
