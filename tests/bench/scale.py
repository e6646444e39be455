"""Simulates a step of plans on 64 to 16,384 GPUs (docs/scale.md).

PYTHONPATH=.typings:tests/support python tests/bench/scale.py --json FILE --svg FILE

A plan's program is that of one replica, as the others run the same. Its instructions are simulated at the planner's
costs, as by `pentad plan --draws`.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from record import stamp, write
from scatter import svg_shares

from pentad.orchestrator.config.config import RunConfig
from pentad.orchestrator.planning.estimate import costs_of, memory
from pentad.orchestrator.planning.hardware import rates_of
from pentad.orchestrator.planning.planning import make_plan
from pentad.orchestrator.simulation.band import PlanBand, plan_band
from pentad.schedules.ir.columns import op_mask
from pentad.schedules.simulate.costs import RUNS_KERNELS, Costs, instruction_seconds
from pentad.schedules.simulate.events import Events, acyclic_events
from pentad.schedules.simulate.rates import Links
from pentad.schedules.simulate.simulate import event_times
from pentad.schedules.spec.plan import Plan

GPU, LENGTH, BATCH = "NVIDIA H100 80GB HBM3", 8192, 2048  # sequences of a step in strong scaling
GPUS = (64, 256, 1024, 4096, 16384)
DRAWN = 4_000_000  # events of all draws together
MOST = 256  # microbatches of a replica in strong scaling
FREE = Links.uniform(0.0, 1e18)
LAYERS = {"vocab": 128256, "kv_heads": 8}
EXPERTS = {"num_experts": 256, "top_k": 8, "intermediate_size": 2048, "shared_intermediate_size": 2048}
EXPERTS |= {"num_groups": 8, "topk_groups": 4, "first_k_dense": 3}
MLA = {"kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}


@dataclass(frozen=True)
class Model:
    """Sizes, mesh of a replica, chunks a pipeline rank, microbatches a replica in weak scaling, recomputation, the
    fewest GPUs on which it fits, and the transport."""

    sizes: dict[str, Any]
    mesh: dict[str, int]
    chunks: int
    microbatches: int
    recompute: str
    least: int = 64
    transport: str = "auto"

    @property
    def ranks(self) -> int:
        return int(np.prod([*self.mesh.values()]))


MODELS = {
    "8B": Model(LAYERS | {"layers": 32, "hidden": 4096, "heads": 32, "ffn": 14336}, {"tp": 2, "pp": 1}, 1, 16, "none"),
    "70B": Model(LAYERS | {"layers": 80, "hidden": 8192, "heads": 64, "ffn": 28672}, {"tp": 8, "pp": 4}, 5, 16, "none"),
    "405B": Model(
        LAYERS | {"layers": 126, "hidden": 16384, "heads": 128, "ffn": 53248}, {"tp": 8, "pp": 16}, 4, 64, "selective"
    ),
    "DeepSeek-V3": Model(
        {"family": "deepseek-v3", "layers": 61, "hidden": 7168, "heads": 128, "kv_heads": 128, "ffn": 18432}
        | {"vocab": 129280, "mla": MLA, "experts": EXPERTS},
        {"ep": 8, "pp": 16},
        1,
        64,
        "full",
        1024,
        "nccl",
    ),
}


def plan_of(model: Model, gpus: int, microbatches: int) -> Plan:
    dp, ep = gpus // model.ranks, model.mesh.get("ep", 1)
    name, chunks = ("interleaved", model.chunks) if model.chunks > 1 else ("1f1b", None)
    config = RunConfig.model_validate(
        {
            "run": {"name": "scale", "steps": 1},
            "model": model.sizes,
            "mesh": model.mesh | {"dp": dp},
            "schedule": {"name": name, "chunks": chunks, "microbatches": microbatches},
            "batch": {"global_batch_size": microbatches * dp * ep, "sequence_length": LENGTH},
            "data": {"path": "builtin:pydoc"},
            "zero": {"stage": 1 if dp * ep > 1 else 0},
            "memory": {"recompute": model.recompute},
            "cluster": {
                "gpu": GPU,
                "device": "cuda",
                "address": "auto",
                "rates": "builtin",
                "transport": model.transport,
            },
        }
    )
    return make_plan(config, "cuda", proved=False)


def seconds_of(plan: Plan, events: Events, costs: Costs) -> float:
    """Seconds of a step."""
    times = event_times(plan.program, events, costs)
    return float(times.ends.max() - times.starts.min())


def limits(plan: Plan, events: Events, found: PlanBand) -> dict[str, float]:
    """Fractions of a step, each the time saved by removing one more cause, in this order; compute is what is left."""
    rates, costs, typical = rates_of("cuda", plan.gpu), costs_of(plan), found.band.middle
    alone = seconds_of(plan, events, replace(costs, reduce=(), gather=()))
    free = replace(rates, intra_host=FREE, inter_host=FREE, peer=FREE)
    unlinked = replace(costs_of(plan, free), reduce=(), gather=(), transfer=0.0)
    linked = seconds_of(plan, events, unlinked)
    rows = plan.program.columns.rows_of(op_mask(RUNS_KERNELS))
    seconds = instruction_seconds(plan.program, unlinked)[rows]
    busy = np.bincount(plan.program.columns.rank[rows], seconds, plan.program.ranks).mean()
    parts = {
        "deviations": typical - found.shared,
        "shared links": found.shared - found.nominal,
        "gradients and weights": found.nominal - alone,
        "links of layers and stages": alone - linked,
        "bubble, imbalance, update": linked - busy,
        "compute": busy,
    }
    return {name: round(float(part) / typical, 4) for name, part in parts.items()}


def measure(model: Model, gpus: int, microbatches: int) -> dict[str, Any]:
    plan = plan_of(model, gpus, microbatches)
    events = acyclic_events(plan.program)
    found = plan_band(plan, min(512, DRAWN // len(events.order)), events)
    assert found.mfu is not None
    gib = max(memory(plan, plan.mesh.move(0, pp=pp))["total"] for pp in range(plan.mesh.pp)) / 2**30
    return {
        "gpus": gpus,
        "microbatches": microbatches,
        "seconds": [round(each, 4) for each in found.band],
        "mfu": round(found.mfu.middle, 4),
        "gib": round(gib, 1),
        "limits": limits(plan, events, found),
    }


def settings_of(model: Model) -> dict[str, list[tuple[int, int]]]:
    """(GPUs, microbatches of a replica): with a fixed number for each replica, and with a fixed batch of BATCH
    sequences."""
    sizes = [gpus for gpus in GPUS if gpus >= max(model.ranks, model.least)]
    strong = [(gpus, BATCH * model.mesh.get("tp", 1) * model.mesh["pp"] // gpus) for gpus in sizes]
    return {
        "weak": [(gpus, model.microbatches) for gpus in sizes],
        "strong": [(gpus, each) for gpus, each in strong if 1 <= each <= MOST],
    }


def table(found: dict[str, Any], kind: str) -> str:
    """The table in docs/scale.md."""
    lines = [
        "| model | GPUs | microbatches | seconds, 5 to 95 % | MFU | GiB | largest losses |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, of in found.items():
        for row in of[kind]:
            low, _, high = row["seconds"]
            losses = sorted(((share, loss) for loss, share in row["limits"].items() if loss != "compute"), reverse=True)
            words = ", ".join(f"{loss} {100 * share:.0f} %" for share, loss in losses[:3] if share >= 0.005)
            seconds, used = f"{low:.4g} to {high:.4g}", f"{100 * row['mfu']:.1f} %"
            lines.append(
                f"| {name} | {row['gpus']:,} | {row['microbatches']} | {seconds} | {used} | {row['gib']} | {words} |"
            )
    return "\n".join(lines)


def picture(found: dict[str, Any]) -> str:
    lines = {}
    for name, of in found.items():
        for kind, mark in (("weak", ""), ("strong", "*")):
            lines[name + mark] = [(row["gpus"], row["mfu"]) for row in of[kind]]
    return svg_shares(lines, title="MFU, weak scaling and (dashed) strong scaling, simulated", label="GPUs")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path)
    parser.add_argument("--svg", type=Path)
    given = parser.parse_args()
    found: dict[str, Any] = {}
    for name, model in MODELS.items():
        settings = settings_of(model)
        found[name] = {kind: [measure(model, *each) for each in its] for kind, its in settings.items()}
        print(name, found[name], flush=True)
    write(given.json, {**stamp(), "models": found})
    if given.svg is not None:
        given.svg.write_text(picture(found))


if __name__ == "__main__":
    main()
