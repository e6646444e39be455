"""Copies in the memory of ranks, on GPUs: recovery from them has the bits of a run without a fault, and training hardly
stops while they are made."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from gpus import RANKS_A_GPU, on_gpu
from memory_copies import Copies, assert_recovers_from_a_copy
from plans import MODEL, plan_of
from worker_processes import WorkerProcess, call_all, ranks_of, start_run

from pentad.schedules.spec.schedule_spec import MemoryOptions

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(150 * RANKS_A_GPU)]
CASES: dict[str, Any] = {
    "ZeRO-1": ("1f1b", {"dp": 2}, 1),
    "ZeRO-3": ("1f1b", {"dp": 2, "unit_layers": 1}, 3),
    "zb-h2, some updates taken back": ("zb-h2", {"pp": 2, "post_validation": True}, 0),
    "tp2": ("1f1b", {"tp": 2}, 0),
    "cp2": ("1f1b", {"cp": 2}, 3),
}
LARGE = replace(MODEL, layers=4, hidden=2048, heads=16, kv_heads=16, ffn=8192)  # 0.27 billion parameters
STOP_SECONDS, STOP_SHARE = 0.05, 0.01  # of a step
STEPS = 6


@pytest.mark.sampled(3)
@pytest.mark.parametrize("transport", ["peer", "nccl"])
@pytest.mark.parametrize("case", CASES)
def test_a_rank_lost_without_a_checkpoint_is_replaced_to_the_same_bits(
    workers: list[WorkerProcess], corpus: str, case: str, transport: str
) -> None:
    name, axes, zero = CASES[case]
    options = MemoryOptions(zero=zero)
    given = {"dp": 1, "pp": 1, "microbatches": 8, "dtype": "float32", "memory_options": options, **axes}
    plan = replace(on_gpu(plan_of(name, data=corpus, **given), transport, memory_options=options), replicate_every=4)
    with ranks_of(workers, plan.mesh.size) as ranks:
        assert_recovers_from_a_copy(ranks, plan, "AB", 4, 10, 1)


def test_training_hardly_stops_for_a_copy(workers: list[WorkerProcess], corpus: str) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("2 GPUs are needed, as ranks that share one wait for each other")
    options = MemoryOptions(zero=1)
    plan = on_gpu(plan_of("1f1b", 2, 1, 64, corpus, "bfloat16", model=LARGE, memory_options=options))
    plan, times, sent = replace(plan, replicate_every=STEPS), dict[bool, list[float]](), list[Any]()
    with ranks_of(workers, 2) as ranks:
        start_run(ranks, plan)
        copies = Copies(ranks, "AB")
        call_all(ranks, "run", 0, STEPS)
        copies.make(1, STEPS)  # the first copies allocate memory
        for number in range(1, 9):
            first, copied = number * STEPS, number % 2 == 0
            asked = copies.submit(1, first) if copied else []
            began = time.monotonic()
            call_all(ranks, "run", first, STEPS)
            times.setdefault(copied, []).append(time.monotonic() - began)
            sent += [worker.answer(number) for worker, number in asked]
            for worker in ranks if copied else []:
                worker.answer(worker.call_now("commit", copies.key(1, first)))
        call_all(ranks, "close")
    step, stop = min(times[False]) / STEPS, min(times[True]) - min(times[False])
    print(f"{sent[-1].bytes / 1e9:.1f} GB a rank stop training for {stop * 1e3:.0f} ms of steps of {step * 1e3:.0f} ms")
    print(sent[-1], {copied: [round(each, 3) for each in its] for copied, its in times.items()})
    assert stop < max(STOP_SECONDS, STOP_SHARE * step)
