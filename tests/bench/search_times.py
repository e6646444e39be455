"""CPU seconds of searches, each in a process of its own (docs/parallelism.md).

PYTHONPATH=.typings:tests/support python tests/bench/search_times.py --json FILE
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from record import record
from scale import MODELS

from pentad.orchestrator.config.config import RunConfig
from pentad.orchestrator.planning.fit import device_memory
from pentad.orchestrator.search.search import search

H100, H200 = ("NVIDIA H100 80GB HBM3", 79.0), ("NVIDIA H200", 139.0)  # and their GiB


@dataclass(frozen=True)
class Case:
    model: str
    gpus: int
    sequences: int
    device: tuple[str, float] = H200
    recompute: str | None = None  # as on the command line


CASES = {
    "8B on 8": Case("8B", 8, 64),
    "8B on 64": Case("8B", 64, 256),
    "8B on 256": Case("8B", 256, 1024),
    "8B on 1,024": Case("8B", 1024, 2048, H100),
    "70B on 8": Case("70B", 8, 64),
    "70B on 64": Case("70B", 64, 256),
    "70B on 256": Case("70B", 256, 1024),
    "70B on 1,024": Case("70B", 1024, 1024, H100),
    "DeepSeek-V3 on 8": Case("DeepSeek-V3", 8, 64),
    "DeepSeek-V3 on 64": Case("DeepSeek-V3", 64, 1024),
    "DeepSeek-V3 on 256": Case("DeepSeek-V3", 256, 1024),
    "DeepSeek-V3 on 1,024": Case("DeepSeek-V3", 1024, 1024),
    "8B on 8 of 40 GiB": Case("8B", 8, 64, ("NVIDIA H200", 40.0)),
    "8B on 4, recompute full": Case("8B", 4, 64, recompute="full"),
}


def config_of(case: Case) -> RunConfig:
    return RunConfig.model_validate(
        {
            "run": {"name": "search", "steps": 1},
            "model": MODELS[case.model].sizes,
            "mesh": {},
            "schedule": {"name": "1f1b", "microbatches": 1},
            "batch": {"global_batch_size": case.sequences, "sequence_length": 4096},
            "data": {"path": "builtin:pydoc"},
            "memory": {} if case.recompute is None else {"recompute": case.recompute},
            "cluster": {"gpu": case.device[0], "device": "cuda", "address": "auto", "rates": "builtin"},
        }
    )


def measure(case: Case) -> dict[str, Any]:
    config, device = config_of(case), device_memory("cuda", case.device[1])
    held = () if case.recompute is None else ("memory.recompute",)
    begin = time.process_time()
    found = search(config, case.gpus, device, held)
    seconds = time.process_time() - begin
    return {"cpu_seconds": round(seconds, 2), "planned": found.planned, "meshes": len(found.choices)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    for name, case in CASES.items():
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            record(given.json, name, lambda: pool.apply(measure, (case,)))  # noqa: B023


if __name__ == "__main__":
    main()
