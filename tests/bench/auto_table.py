"""Compares `auto` with the best schedule of the catalogue, by simulated time.

PYTHONPATH=.typings:tests/support python tests/bench/auto_table.py --json FILE

Only schedules that hold one copy of the parameters are compared; DualPipe holds two.

Costs are those of `guess_costs`: 2 FLOPs per weight and token for each of F, B and W at 400 TFLOP/s, causal attention
2 T S A in F and 2.5 times that in B, the output head 2 T V H in each, transfers at 300 GB/s. A mixture-of-experts layer
counts its active weights and, in F and in B, an all-to-all of every token to its experts and back at 50 GB/s.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from record import stamp, write

from pentad.orchestrator.activations.allocations import Piece
from pentad.orchestrator.planning.cost_model import guess_costs
from pentad.orchestrator.planning.hardware import rates_of
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.ir.program import Program
from pentad.schedules.search.auto import EFFORT, choose
from pentad.schedules.search.problem import Objective
from pentad.schedules.simulate.costs import Costs
from pentad.schedules.spec.model import ModelSpec
from pentad.schedules.spec.plan import split_layers
from pentad.schedules.spec.schedule_spec import ScheduleOptions
from pentad.schedules.spec.tensors import head_in_layers

HOST_BANDWIDTH = 25e9  # bytes/s between hosts
ALL_TO_ALL_BANDWIDTH = 50e9  # bytes/s per rank, of expert parallelism


@dataclass(frozen=True)
class Model:
    """`top_k` experts per token in all but the first `first_k_dense` layers; a dense model if `top_k` is 0."""

    spec: ModelSpec
    first_k_dense: int = 0
    top_k: int = 0


# layers, hidden, heads, kv_heads, ffn (the sum over a token's experts), vocab
MODELS = {
    "1B": Model(ModelSpec(16, 2048, 32, 8, 8192, 128256)),
    "8B": Model(ModelSpec(32, 4096, 32, 8, 14336, 128256)),
    "7B-152k": Model(ModelSpec(28, 3584, 28, 4, 18944, 152064)),
    "9B-256k": Model(ModelSpec(42, 3584, 16, 8, 14336, 256000)),
    "70B": Model(ModelSpec(80, 8192, 64, 8, 28672, 128256)),
    "16B-moe": Model(ModelSpec(27, 2048, 16, 16, 11264, 102400), first_k_dense=1, top_k=6),
    "671B-moe": Model(ModelSpec(61, 7168, 128, 128, 18432, 129280), first_k_dense=3, top_k=8),
}


@dataclass(frozen=True)
class Case:
    """`limit` is a multiple of 1F1B's activation memory (`ranks` microbatches), `slow` a factor of time by rank,
    `hosts` the number of hosts that the pipeline spans. `gains`: the search is expected to beat the catalogue."""

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

    def costs(self, order: Program) -> Costs | None:
        """Milliseconds; None if the model has too few layers for the program's stages."""
        model, spec = MODELS[self.model], MODELS[self.model].spec
        try:
            layers = split_layers(spec.layers, order.placement, head_in_layers(spec, self.length))
        except PentadError:
            return None
        costs = guess_costs(spec, layers, order.placement, Piece(1, self.length, "bfloat16", "cuda"), rates_of("cuda"))
        activation_bytes = 2 * self.length * spec.hidden
        moe_layers = [max(at.end - max(at.first, model.first_k_dense), 0) if model.top_k else 0 for at in layers]
        all_to_all = [1e3 * count * 2 * model.top_k * activation_bytes / ALL_TO_ALL_BANDWIDTH for count in moe_layers]
        near, far = 1e3 * costs.transfer, 1e3 * activation_bytes / HOST_BANDWIDTH
        host = [rank * self.hosts // self.ranks for rank in range(self.ranks)]
        return replace(
            costs,
            forward=tuple(1e3 * f + moved for f, moved in zip(costs.forward, all_to_all, strict=True)),
            backward=tuple(1e3 * b + moved for b, moved in zip(costs.backward, all_to_all, strict=True)),
            weight=tuple(1e3 * w for w in costs.weight),
            transfer=near,
            launch=1e3 * costs.launch,
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
    """A row of the table. Times are in milliseconds, `seconds` are CPU seconds of the search."""
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
    auto_time, catalogue_time = getattr(best, case.objective), getattr(known, case.objective) if known else None
    return {
        "case": case.name,
        "catalogue": known.name if known else None,
        "catalogue_time": catalogue_time,
        "auto": best.name,
        "origin": best.origin,
        "chunks": best.program.chunks,
        "auto_time": auto_time,
        "gain_percent": 100 * (1 - auto_time / catalogue_time) if catalogue_time else None,
        "bound": choice.bound.time,
        "gap_percent": 100 * choice.gap,
        "why": choice.bound.why,
        "seconds": round(seconds, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", help="run only the cases with this text in their names", default="")
    args = parser.parse_args()
    rows = []
    for case in CASES:
        if args.only not in case.name:
            continue
        result = row(case)
        rows.append(result)
        times = (
            f"{result['catalogue'] or 'none':>15} {result['catalogue_time'] or 0:9.2f}  auto {result['auto_time']:9.2f}"
        )
        gain, gap = f"gain {result['gain_percent'] or 0:5.2f} %", f"gap {result['gap_percent']:5.2f} %"
        origin = f"{result['auto']} {result['origin']}"
        print(f"{case.name:<62}{times}  {gain}  {gap}  {result['seconds']:5.1f} s  {origin}", flush=True)
    write(args.json, {**stamp(), "unit": "milliseconds; seconds are CPU seconds", "rows": rows})


if __name__ == "__main__":
    main()
