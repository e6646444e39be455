"""CPU seconds of a search for flipped bits, beside those of a step, of two ranks that hold the same parameters.

PYTHONPATH=.typings:tests/support python tests/bench/bit_checks.py --json tests/bench/results/bit-checks-cpu.json

The digests are timed by themselves, too; with CUDA they are on a GPU, in seconds of the device.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from plans import MODEL, plan_of
from record import record
from worker_processes import WorkerProcess, call_all, start_run

from pentad.schedules.spec.plan import Plan
from pentad.workers.data.sources import builtin_corpus
from pentad.workers.integrity.digest import digest

MODEL_10M = replace(MODEL, hidden=320, heads=8, kv_heads=4, ffn=960)  # parameters in layers; sequences have 8 tokens
ROUNDS, ELEMENTS = 3, 2**26
TICKS = os.sysconf("SC_CLK_TCK")


def cpu_seconds(workers: list[WorkerProcess]) -> float:
    """CPU seconds of all processes so far."""
    fields = [Path(f"/proc/{worker.process.pid}/stat").read_text().rpartition(")")[2].split() for worker in workers]
    return sum(int(each[11]) + int(each[12]) for each in fields) / TICKS


def spent(workers: list[WorkerProcess], action: Callable[[], Any]) -> float:
    before = cpu_seconds(workers)
    action()
    return (cpu_seconds(workers) - before) / len(workers)


def of_ranks(plan: Plan) -> dict[str, Any]:
    """CPU seconds of one rank."""
    workers = [WorkerProcess() for _ in range(plan.mesh.size)]
    try:
        start_run(workers, plan)
        call_all(workers, "run", 0, 1)
        call_all(workers, "check", 1)
        step = spent(workers, lambda: call_all(workers, "run", 1, ROUNDS)) / ROUNDS
        check = spent(workers, lambda: [call_all(workers, "check", 1 + ROUNDS) for _ in range(ROUNDS)]) / ROUNDS
        call_all(workers, "close")
    finally:
        for worker in workers:
            worker.stop()
    millions = sum(map(plan.size, plan.param_shards_of(0))) / 1e6
    found = {"million_parameters": round(millions, 2), "microbatches": plan.batch.microbatches}
    return found | {"cpu_seconds_a_step": round(step, 3), "cpu_seconds_a_check": round(check, 3)}


def of_digests(device: str) -> dict[str, float]:
    """Nanoseconds a float32 element."""
    values, clock = torch.randn(ELEMENTS, device=device), time.process_time if device == "cpu" else time.monotonic
    int(digest(values))
    began = clock()
    for _ in range(ROUNDS):
        int(digest(values))
    return {f"digest_{device}_ns_an_element": round((clock() - began) / ROUNDS / ELEMENTS * 1e9, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    path = parser.parse_args().json
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        corpus = str(builtin_corpus("pydoc", MODEL.vocab, Path(folder)))
        plan = plan_of("1f1b", 2, 1, 8, corpus, "float32", model=MODEL_10M)
        record(path, "ranks", lambda: of_ranks(plan))
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    record(path, "digests", lambda: {k: v for device in devices for k, v in of_digests(device).items()})


if __name__ == "__main__":
    main()
