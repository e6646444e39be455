"""Simulates what room for more tokens gives data-aware groups, and plans how much room there is.

PYTHONPATH=.typings:tests/support python tests/bench/capacity.py RESULTS.json

Nothing is trained. `balance`: steps of tests/bench/uneven.py, with its costs and lengths, in
which a rank holds at most `factor` times its even share of tokens; the time of the last rank over the mean work of all,
the mean of as many batches as stated. `planned`: the factor that data.capacity_factor: auto chooses for Llama 3.1 8B on
eight H100 of 80 GB (dp2 x cp4, ZeRO-3, two microbatches of a sequence, memory.recompute: attention, a host of 2,000
GiB), by memory.offload_fraction; null: the even share does not fit.
"""

from __future__ import annotations

import json
import platform
import sys
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from paths import ROOT
from uneven import COSTS, MICROBATCHES, MIXES, TOKENS, rows_of

from pentad.orchestrator.api.plans import planned
from pentad.orchestrator.config.config import load
from pentad.schedules.search.hybrid_planner import hybrid
from pentad.schedules.spec.batch import BatchSpec

FACTORS = (1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 4.0, 6.0)
POOLS = [(8, 2**17), (16, 2**18), (32, 2**20)]
BATCHES = 4
SHARES, LENGTHS = (0.0, 0.25, 0.5, 0.75, 1.0), (2**17, 2**18, 2**19)
JOB = ROOT / "deploy" / "jobs" / "llama-8b.yaml"
GIVEN = (
    *("cluster.gpu=NVIDIA H100 80GB HBM3", "mesh.tp=1", "mesh.dp=2", "mesh.cp=4", "zero.stage=3"),
    *("schedule.microbatches=2", "batch.global_batch_size=4", "memory.recompute=attention", "memory.host_gib=2000"),
    *("data.packing=documents", "data.document_mask=true", "data.balance=dynamic", "data.capacity_factor=auto"),
)


def end_over_mean(mix: str, ranks: int, cap: int, seed: int, factor: float) -> float:
    cp = cap // TOKENS
    rows = rows_of(mix, cap, ranks // cp * MICROBATCHES, seed)
    capacity = int(factor * TOKENS)
    batch = BatchSpec(len(rows), cap, MICROBATCHES, ranks // cp, document_costs=COSTS, capacity=capacity)
    even = sum(float(COSTS.alone(row).sum()) for row in rows) / ranks
    return hybrid(rows, batch, cp)[1].end / even


def planned_factor(length: int, share: float) -> float | None:
    config = load(JOB, [*GIVEN, f"batch.sequence_length={length}", f"memory.offload_fraction={share}"])
    found = planned(config, "cuda")
    return found.capacity.factor if found.capacity else None


def main(out: Path) -> None:
    balance, room = list[dict[str, Any]](), list[dict[str, Any]]()
    for mix in MIXES:
        for ranks, cap in POOLS:
            ends = {
                f"{factor:g}": round(fmean(end_over_mean(mix, ranks, cap, seed, factor) for seed in range(BATCHES)), 3)
                for factor in FACTORS
            }
            balance.append({"mix": mix, "ranks": ranks, "cap": cap, "batches": BATCHES, "end_over_mean": ends})
            print(balance[-1], flush=True)
    for length in LENGTHS:
        room.append({"length": length, "factor": {f"{share:g}": planned_factor(length, share) for share in SHARES}})
        print(room[-1], flush=True)
    machine = f"{platform.machine()}, Python {platform.python_version()}, numpy {np.__version__}"
    command = f"PYTHONPATH=.typings:tests/support python tests/bench/capacity.py {out}"
    facts = {"kind": "simulation", "command": command, "machine": machine}
    facts |= {"date": datetime.now(UTC).date().isoformat(), "about": __doc__}
    out.write_text(json.dumps({**facts, "balance": balance, "planned": room}, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
