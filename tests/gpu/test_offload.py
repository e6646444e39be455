"""Offloaded units on GPUs: the bits of a run without, peak memory as planned, and no allocation in a steady step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from bits import same_bits
from fleet import Fleet
from gpus import RANKS_A_GPU, as_is_on_gpu
from plans import plan_of

from pentad.orchestrator.activations.activation_peaks import activation_peaks
from pentad.orchestrator.activations.offloaded_tensors import with_slots
from pentad.schedules.spec.batch import BatchSpec
from pentad.schedules.spec.model import ModelSpec
from pentad.schedules.spec.plan import Plan
from pentad.workers.runtime.runner import Runner

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120 * RANKS_A_GPU)]
# So large that activations outweigh temporary tensors, and copies take as long as compute.
LARGE = ModelSpec(layers=8, hidden=512, heads=4, kv_heads=2, ffn=1536, vocab=300)


def large_plan(corpus: str, recompute: str, offload: float, rows: float = 1.0) -> Plan:
    given: dict[str, Any] = {"recompute": recompute, "recompute_fraction": rows}
    plan = plan_of("1f1b", 1, 1, 2, corpus, unit_layers=1, offload=offload, **given)
    batch = BatchSpec(global_batch_size=4, sequence_length=4096, microbatches=2, replicas=1)
    return as_is_on_gpu(replace(plan, model=LARGE, batch=batch), "nccl")


@pytest.mark.sampled(5)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("recompute", ["none", "attention", "full"])
@pytest.mark.parametrize("name", ["zb-h2", "zb-v", "dualpipe"])
def test_offloading_changes_no_bit(gpus, corpus, name, recompute, dtype) -> None:
    runs = []
    for offload in (0.0, 0.3, 1.0):
        plan = plan_of(name, 1, 2, 4, corpus, unit_layers=1, recompute=recompute, offload=offload)
        runs.append(gpus.run(as_is_on_gpu(plan, "peer", dtype), [(0, 2), (2, 1)]))
    for plain, *others in zip(*runs, strict=True):
        for other in others:
            assert same_bits(plain.state, other.state)
            assert [each.losses for each in plain.results] == [each.losses for each in other.results]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("parts", ["mlp", "qkv_linear", "attn_proj", "attention"])
@pytest.mark.parametrize("offload", [0.0, 1.0])
def test_recomputed_rows_change_no_bit(gpus, corpus, offload, parts) -> None:
    """Products of the last rows, from multiples of 128 on, have the bits of those of all 8,192 rows; in float32 they do
    not, as cuBLAS takes another kernel for fewer rows."""
    runs = []
    for mode, rows in (("none", 1.0), (parts, 0.3), (parts, 0.5)):
        plan = large_plan(corpus, mode, offload * (mode != "none"), rows)
        runs.append(gpus.run(plan, [(0, 2)])[0])
    for other in runs[1:]:
        assert same_bits(runs[0].state, other.state)
        assert [each.losses for each in runs[0].results] == [each.losses for each in other.results]


def test_recomputed_rows_have_their_planned_peak(corpus: str) -> None:
    peaks, planned = list[int](), list[int]()
    for rows in (1.0, 0.5, 0.25):
        plan, fleet = large_plan(corpus, "attention", 0.0, rows), Fleet(1)
        try:
            (outcome,) = fleet.run(plan, [(0, 3)])
        finally:
            fleet.stop()
        peaks.append(outcome.results[-1].peak_bytes)
        planned.append(activation_peaks(plan, 0)[0])
    for peak, plan_peak in zip(peaks[1:], planned[1:], strict=True):
        assert peak - peaks[0] == pytest.approx(plan_peak - planned[0], rel=0.05)


@pytest.mark.parametrize("recompute", ["none", "attention"])
def test_large_units_keep_their_bits_and_their_planned_peak(corpus: str, recompute: str) -> None:
    """Copies of tens of MiB run beside compute that reuses memory at once."""
    outcomes, peaks, planned = {}, {}, {}
    for offload in (0.0, 0.5, 1.0):
        plan, fleet = large_plan(corpus, recompute, offload), Fleet(1)  # whose process reports its largest allocation
        try:
            (outcomes[offload],) = fleet.run(plan, [(0, 3)])
        finally:
            fleet.stop()
        peaks[offload], planned[offload] = outcomes[offload].results[-1].peak_bytes, activation_peaks(plan, 0)[0]
    for offload in (0.5, 1.0):
        assert same_bits(outcomes[0.0].state, outcomes[offload].state)
        saved = peaks[0.0] - peaks[offload]
        assert saved == pytest.approx(planned[0.0] - planned[offload], rel=0.03), offload


def test_a_steady_step_asks_the_driver_for_no_memory(corpus: str, tmp_path) -> None:
    plan = with_slots(large_plan(corpus, "none", 0.5))
    runner = Runner(plan, 0, tmp_path / "progress")
    runner.connect(runner.serve("127.0.0.1", 30), 30)
    runner.restore(None)
    try:
        runner.run(0, 2)
        before = torch.cuda.memory_stats()["num_device_alloc"]
        runner.run(2, 3)
        assert torch.cuda.memory_stats()["num_device_alloc"] == before
    finally:
        runner.close()
