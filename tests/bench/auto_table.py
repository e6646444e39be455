"""What `auto` gains over the catalogue: `PYTHONPATH=.typings python -P tests/bench/auto_table.py --json FILE`.

Of schedules that hold the parameters once: dualpipe, which holds them twice, is left out on both sides.

Costs are `guess_costs`: 2 FLOPs a weight and token for each of F, B and W at 400 TFLOP/s, causal attention 2 T S A in F
and 2.5 times that in B, the output head 2 T V H in each, transfers at 300 GB/s. A layer of experts counts its active
weights and, in F and in B, the exchange of every token with `active` experts there and back at 50 GB/s.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pentad.orchestrator.planning.cost_model import guess_costs
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.ir.program import Program
from pentad.schedules.search.auto import EFFORT, choose
from pentad.schedules.search.problem import Objective
from pentad.schedules.simulate.costs import Costs
from pentad.schedules.spec.model import ModelSpec
from pentad.schedules.spec.plan import BatchSpec, split_layers
from pentad.schedules.spec.schedule_spec import ScheduleOptions
from pentad.schedules.spec.tensors import head_in_layers

BETWEEN_HOSTS = 25e9  # bytes/s
EXCHANGE = 50e9  # bytes/s of a rank in an all-to-all of experts


@dataclass(frozen=True)
class Model:
    """`dense` layers of `shape`, and from there on layers of experts with `active` a token (0: none)."""

    shape: ModelSpec
    dense: int = 0
    active: int = 0


# layers, hidden, heads, key-value heads, ffn (experts: of all active ones together), vocabulary
MODELS = {
    "1B": Model(ModelSpec(16, 2048, 32, 8, 8192, 128256)),
    "8B": Model(ModelSpec(32, 4096, 32, 8, 14336, 128256)),
    "7B-152k": Model(ModelSpec(28, 3584, 28, 4, 18944, 152064)),
    "9B-256k": Model(ModelSpec(42, 3584, 16, 8, 14336, 256000)),
    "70B": Model(ModelSpec(80, 8192, 64, 8, 28672, 128256)),
    "16B-moe": Model(ModelSpec(27, 2048, 16, 16, 11264, 102400), dense=1, active=6),
    "671B-moe": Model(ModelSpec(61, 7168, 128, 128, 18432, 129280), dense=3, active=8),
}


@dataclass(frozen=True)
class Case:
    """`limit` in shares of 1F1B's memory, `ranks` microbatches (None: none); `slow` are factors by rank, `hosts` over
    how many the pipeline is spread; `gains` where a search must find more than the catalogue has."""

    model: str
    ranks: int
    microbatches: int
    limit: float | None = 1.0
    length: int = 4096
    slow: dict[int, float] = field(default_factory=dict)
    hosts: int = 1
    objective: Objective = "makespan"
    gains: bool = True

    @property
    def name(self) -> str:
        parts = [f"{self.model} on {self.ranks}, {self.microbatches} microbatches"]
        parts += [f"{self.length // 1024}k tokens"] if self.length != 4096 else []
        parts += [f"limit {self.limit:g}p"] if self.limit is not None else ["no limit"]
        parts += [f"rank {rank} {factor:g} times as slow" for rank, factor in self.slow.items()]
        parts += [f"{self.hosts} hosts"] if self.hosts > 1 else []
        return ", ".join(parts + ["no barrier"] * (self.objective == "longest"))

    def costs(self, placed: Program) -> Costs | None:
        """In milliseconds."""
        model, shape = MODELS[self.model], MODELS[self.model].shape
        batch = BatchSpec(self.microbatches, self.length, self.microbatches, 1)
        try:
            layers = split_layers(shape.layers, placed.placement, head_in_layers(shape, self.length))
        except PentadError:
            return None
        found = guess_costs(shape, layers, batch, "cuda", "bfloat16")
        tensor = 2 * self.length * shape.hidden  # bytes
        experts = [max(end - max(first, model.dense), 0) if model.active else 0 for first, end in layers]
        moved = [1e3 * each * 2 * model.active * tensor / EXCHANGE for each in experts]
        near, far = 1e3 * found.transfer, 1e3 * tensor / BETWEEN_HOSTS
        host = [rank * self.hosts // self.ranks for rank in range(self.ranks)]
        return replace(
            found,
            forward=tuple(1e3 * f + more for f, more in zip(found.forward, moved, strict=True)),
            backward=tuple(1e3 * b + more for b, more in zip(found.backward, moved, strict=True)),
            weight=tuple(1e3 * w for w in found.weight),
            transfer=near,
            launch=1e3 * found.launch,
            slowdown=tuple(self.slow.get(rank, 1.0) for rank in range(self.ranks)) if self.slow else (),
            links=tuple(tuple(near if a == b else far for b in host) for a in host) if self.hosts > 1 else (),
        )


CASES = [
    Case("8B", 8, 32, None),
    Case("8B", 8, 32, 2.0),
    Case("8B", 8, 32, 1.5),
    Case("8B", 8, 32, 1.25),
    Case("8B", 8, 32, 1.0),
    Case("8B", 8, 32, 0.75),
    Case("8B", 8, 32, 0.5),
    Case("8B", 8, 16, 1.0),
    Case("8B", 4, 16, 1.0),
    Case("8B", 8, 32, 1.0, slow={3: 1.15}),
    Case("8B", 8, 32, 1.5, slow={0: 1.2}),
    Case("8B", 8, 32, 1.0, hosts=2),
    Case("8B", 8, 32, 1.0, length=32768),
    Case("8B", 8, 32, 1.5, objective="longest", gains=False),
    Case("1B", 4, 16, 1.0),
    Case("1B", 8, 32, 1.0, gains=False),
    Case("7B-152k", 4, 16, 1.25),
    Case("7B-152k", 7, 28, 1.0),
    Case("9B-256k", 4, 16, 1.5, slow={1: 1.1}),
    Case("9B-256k", 6, 24, 1.0),
    Case("9B-256k", 8, 32, 1.5),
    Case("70B", 16, 48, 1.0),
    Case("70B", 16, 48, 1.5),
    Case("16B-moe", 4, 16, 1.0),
    Case("16B-moe", 8, 32, 1.0),
    Case("16B-moe", 8, 32, 1.25, slow={5: 1.1}),
    Case("671B-moe", 16, 48, 1.0, hosts=2),
]


def row(case: Case, effort: int = EFFORT) -> dict[str, Any]:
    """Times in milliseconds."""
    limit = None if case.limit is None else case.limit * case.ranks
    began = time.process_time()
    choice = choose(
        case.ranks,
        case.microbatches,
        case.costs,
        ScheduleOptions(memory_limit=limit),
        case.objective,
        effort,
        two_copies=False,
    )
    seconds = time.process_time() - began
    best, known = choice.best, choice.best_known
    found, before = getattr(best, case.objective), getattr(known, case.objective) if known else None
    return {
        "case": case.name,
        "catalogue": known.name if known else None,
        "catalogue_time": before,
        "auto": best.name,
        "origin": best.origin,
        "chunks": best.program.chunks,
        "auto_time": found,
        "gain_percent": 100 * (1 - found / before) if before else None,
        "bound": choice.bound.time,
        "gap_percent": 100 * choice.gap,
        "why": choice.bound.why,
        "seconds": round(seconds, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", help="cases whose name has this in it", default="")
    given = parser.parse_args()
    rows = []
    for case in CASES:
        if given.only not in case.name:
            continue
        each = row(case)
        rows.append(each)
        times = f"{each['catalogue'] or 'none':>15} {each['catalogue_time'] or 0:9.2f}  auto {each['auto_time']:9.2f}"
        shares = f"gain {each['gain_percent'] or 0:5.2f} %  gap {each['gap_percent']:5.2f} %  {each['seconds']:5.1f} s"
        print(f"{case.name:<62}{times}  {shares}  {each['auto']} {each['origin']}", flush=True)
    if given.json:
        facts = {
            "command": f"PYTHONPATH=.typings python -P {' '.join(sys.argv)}",
            "machine": f"{os.cpu_count()} cores, {sys.platform}, Python {sys.version.split()[0]}",
            "unit": "milliseconds; seconds are of one core",
            "rows": rows,
        }
        given.json.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
