"""Checkpoints saved beside training on GPUs: the bits of their step, and training hardly stops."""

from __future__ import annotations

import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gpus import RANKS_A_GPU, on_gpu
from plans import MODEL, plan_of
from saves import assert_saved_beside_training, written
from small_models import WIDE_MOE
from worker_processes import WorkerProcess, call_all, ranks_of, start_run

from pentad.schedules.spec.plan import Plan
from pentad.schedules.spec.schedule_spec import MemoryOptions
from pentad.workers.checkpoint.checkpoint import folder_of

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(150 * RANKS_A_GPU)]
CASES: dict[str, Any] = {
    "one rank": ("1f1b", {}, 0),
    "one rank, every update taken back": ("zb-h2", {"post_validation": True, "clip": 0.01}, 0),
    "1f1b": ("1f1b", {"dp": 2}, 0),
    "1f1b, ZeRO-3": ("1f1b", {"dp": 2, "unit_layers": 1}, 3),
    "zb-h2, some updates taken back": ("zb-h2", {"pp": 2, "post_validation": True}, 0),
    "dualpipe": ("dualpipe", {"pp": 2}, 0),
    "routing biases": ("1f1b", {"ep": 2, "model": WIDE_MOE}, 0),
    "four ranks": ("zb-h2", {"dp": 2, "pp": 2, "post_validation": True}, 0),
}
LARGE = replace(MODEL, layers=4, hidden=2048, heads=16, kv_heads=16, ffn=8192)  # 0.27 billion parameters
STOP_SECONDS, STOP_SHARE = 0.05, 0.01  # of a step
STEPS = 6


@pytest.mark.sampled(5)
@pytest.mark.parametrize("transport", ["peer", "nccl"])
@pytest.mark.parametrize("case", CASES)
def test_a_checkpoint_saved_while_the_next_steps_run_has_the_bits_of_its_step(
    workers: list[WorkerProcess], corpus: str, tmp_path: Path, case: str, transport: str
) -> None:
    name, axes, zero = CASES[case]
    options = MemoryOptions(zero=zero)
    given = {"dp": 1, "pp": 1, "microbatches": 8, "dtype": "float32", "memory_options": options, **axes}
    plan = on_gpu(plan_of(name, data=corpus, **given), transport, memory_options=options)
    with ranks_of(workers, plan.mesh.size) as ranks:
        assert_saved_beside_training(ranks, plan, tmp_path)


def large_plan(corpus: str, dp: int) -> Plan:
    """Steps of some tenths of a second on one GPU, which never waits for the host to launch what follows."""
    plan = on_gpu(plan_of("1f1b", dp, 1, 16, corpus, "bfloat16", model=LARGE))
    return replace(plan, batch=replace(plan.batch, sequence_length=2048))


def seconds_of(ranks: list[WorkerProcess], first: int, folder: Path | None) -> tuple[float, int]:
    """(seconds that STEPS steps take, bytes of the snapshot). With `folder` the steps begin with a snapshot, which is
    written while they run."""
    asked = [] if folder is None else written(ranks, folder, first)
    began = time.monotonic()
    if folder is not None:
        for rank in ranks:
            rank.call("snapshot", first)
    call_all(ranks, "run", first, STEPS)
    seconds = time.monotonic() - began
    size = sum(entry["bytes"] for rank, number in asked for entry in rank.answer(number).entries)
    if folder is not None:
        shutil.rmtree(folder)
    return seconds, size


@pytest.mark.parametrize("dp", [1, 2])
def test_training_hardly_stops_for_a_checkpoint(
    workers: list[WorkerProcess], corpus: str, tmp_path: Path, dp: int
) -> None:
    if torch.cuda.device_count() < dp:
        pytest.skip(f"{dp} GPUs are needed, as ranks that share one wait for each other")
    plan, times, size = large_plan(corpus, dp), dict[bool, list[float]](), 0
    with ranks_of(workers, dp) as ranks:
        start_run(ranks, plan)
        call_all(ranks, "run", 0, STEPS)
        for number in range(1, 13):
            saves = number % 2 == 0
            folder = folder_of(tmp_path, number * STEPS) if saves else None
            seconds, written_bytes = seconds_of(ranks, number * STEPS, folder)
            times.setdefault(saves, []).append(seconds)
            size = max(size, written_bytes)
        call_all(ranks, "close")
    step, stop = min(times[False]) / STEPS, min(times[True]) - min(times[False])
    print(f"dp{dp}: {size / 1e9:.1f} GB stop training for {stop * 1e3:.0f} ms; a step takes {step * 1e3:.0f} ms")
    print({saves: [round(each, 3) for each in its] for saves, its in times.items()})
    assert stop < max(STOP_SECONDS, STOP_SHARE * step)
