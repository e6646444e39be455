"""Trains configurations on meshes of one host without Ray: losses, tokens/s, planned and measured memory, the step and
its bubble as simulated with the costs of the same steps, and clocks and power of GPUs. With metrics.profile_steps=[N],
also what the kernels of each rank took in that step, which itself takes longer.

PYTHONPATH=.typings:tests/support python tests/bench/meshes.py --out OUT deploy/jobs/llama-8b.yaml mesh.tp=4 -- \\
    deploy/jobs/llama-8b.yaml mesh.tp=1 mesh.pp=4 schedule.name=zb-h2
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from itertools import groupby, pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from gpu_clocks import clocks, sampled
from ranks import Ranks, connected
from record import stamp, write
from step_kernels import longest_kernels, step_kernels

from pentad.orchestrator.api.plans import Device, planned
from pentad.orchestrator.config.config import load
from pentad.orchestrator.planning.estimate import memory, mfu, step_seconds
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.simulate.read_costs import read_costs
from pentad.schedules.simulate.simulate import simulate
from pentad.schedules.simulate.step_profile import RankProfile, unpack
from pentad.schedules.simulate.timeline import Span, Timeline
from pentad.schedules.spec.plan import Plan

WARMUP = 4  # steps that are not timed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON file of the results")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--limit", type=float, default=120.0, help="time limit of a run, in seconds")
    parser.add_argument("--warmup", type=int, default=WARMUP, help="steps that are not timed")
    args, rest = parser.parse_known_args()
    runs = [list(words) for is_separator, words in groupby(rest, lambda word: word == "--") if not is_separator]
    ranks, rows = Ranks(args.limit, train), list[dict[str, Any]]()
    for path, *overrides in runs:
        row = measure(ranks, path, overrides, args.device, args.warmup)
        rows.append(row)
        print(json.dumps({key: value for key, value in row.items() if key not in ("losses", "norms")}), flush=True)
        write(args.out, {**stamp(), "runs": rows})
    ranks.stop()


def measure(ranks: Ranks, path: str, overrides: list[str], device: Device, warmup: int = WARMUP) -> dict[str, Any]:
    """The figures of one run, or its error in one sentence."""
    began = time.monotonic()
    try:
        found = planned(load(Path(path), overrides), device)
        row = {"chosen": found.chosen, **summarize(found.plan, ranks.run(found.plan), warmup)}
    except PentadError as error:
        row = {"error": str(error)}
    return {"config": path, "overrides": overrides, **row, "wall_seconds": round(time.monotonic() - began, 1)}


def train(connection: Connection, plan: Plan, rank: int) -> Any:
    """(results of the steps, bytes allocated before they begin and at their peak, bytes used on the device at the end,
    device name, its clocks)."""
    steps = plan.optimizer.learning_rate.decay_steps
    before = torch.cuda.memory_allocated() if plan.device == "cuda" else 0  # of the run before: nothing
    with connected(connection, plan, rank) as runner:
        if plan.device == "cpu":
            return runner.run(0, steps), 0, 0, 0, "CPU", []
        with sampled(torch.cuda.current_device()) as samples:
            results = runner.run(0, steps)
    free, total = torch.cuda.mem_get_info()
    return results, before, torch.cuda.max_memory_allocated(), total - free, torch.cuda.get_device_name(), samples


def summarize(plan: Plan, answers: list[Any], warmup: int = WARMUP) -> dict[str, Any]:
    results, before, peaks, used, devices, samples = zip(*answers, strict=True)
    steps = plan.optimizer.learning_rate.decay_steps
    starts = [min(span.start for its in results for span in its[step].spans) for step in range(steps)]
    end = max(span.end for its in results for span in its[-1].spans)
    timed = range(warmup, steps)
    seconds = statistics.median(b - a for a, b in pairwise([*starts[warmup:], end]))
    tokens_per_second = plan.batch.tokens / seconds
    planned = [memory(plan, rank)["total"] for rank in range(plan.mesh.size)]
    fullest = max(range(plan.mesh.size), key=lambda rank: peaks[rank])
    losses = [
        sum({n: loss for its in results for n, loss in its[step].losses.items()}.values()) / plan.batch.tokens
        for step in range(steps)
    ]
    return {
        "mesh": str(plan.mesh),
        "schedule": plan.program.name,
        "zero": plan.zero,
        "recompute": sorted(set(plan.recompute)),
        "device": devices[0],
        "step_seconds": round(seconds, 4),
        "host_seconds": round(max(statistics.median(its[step].host_seconds for step in timed) for its in results), 4),
        "tokens_per_second_per_gpu": round(tokens_per_second / plan.mesh.size, 1),
        "mfu": mfu(tokens_per_second, plan, devices[0]),
        **simulated(plan, [tuple(span for its in results for span in its[step].spans) for step in timed]),
        "clocks": [clocks(its, starts[warmup], end) for its in samples],
        "before_gib": round(max(before) / 2**30, 2),
        "peak_gib": round(peaks[fullest] / 2**30, 2),
        "used_gib": round(max(used) / 2**30, 2),
        "planned_gib": round(planned[fullest] / 2**30, 2),
        "planned_over_peak": [round(p / max(1, peak), 4) for p, peak in zip(planned, peaks, strict=True)],
        "first_loss": round(losses[0], 5),
        "last_loss": round(losses[-1], 5),
        "losses": [round(loss, 5) for loss in losses],
        "norms": [float(f"{result.grad_norm:.5g}") for result in results[0]],
        **(
            {"profiles": [profiled(its[plan.profile_steps[-1]].profile) for its in results]}
            if plan.profile_steps
            else {}
        ),
    }


def profiled(profile: RankProfile | None) -> dict[str, Any]:
    """Milliseconds of a rank's kernels; or why there are none."""
    if profile is None or profile.problem:
        return {"error": profile.problem if profile else "no profile"}
    events = unpack(profile.data)
    return {"kernels_ms": step_kernels(events), "longest_ms": longest_kernels(events)}


def simulated(plan: Plan, steps: list[tuple[Span, ...]]) -> dict[str, float]:
    """A simulated step at the costs of these steps: its seconds, and the fraction of its time in which ranks do not
    compute; and that fraction as measured."""
    costs = read_costs(plan.program, Timeline("measured", tuple(span for step in steps for span in step)))
    if costs is None:
        return {}
    timeline = simulate(plan.program, costs)
    measured = statistics.median(Timeline("measured", step).bubble().makespan for step in steps)
    found = {"simulated_seconds": step_seconds(timeline), "bubble_simulated": timeline.bubble().makespan}
    return {key: round(value, 4) for key, value in (found | {"bubble_measured": measured}).items()}


if __name__ == "__main__":
    main()
