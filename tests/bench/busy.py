"""Breaks a step on rank 0's GPU down into compute, NCCL kernels, their overlap, and idle time.

PYTHONPATH=.typings:tests/support python tests/bench/busy.py deploy/jobs/llama-8b.yaml mesh.tp=2 model.layers=12

Copies count as compute. The GPU is idle if the host is late or if it waits for another rank's host.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from ranks import Ranks, connected
from torch.profiler import ProfilerActivity, profile

from pentad.orchestrator.config.config import load
from pentad.orchestrator.planning.planning import make_plan
from pentad.schedules.spec.plan import Plan

Intervals = list[tuple[int, int]]  # starts and ends, ns
STEPS = 6  # the last one is profiled


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("overrides", nargs="*", help="SECTION.KEY=VALUE over the config")
    args = parser.parse_args()
    overrides = [*args.overrides, f"run.steps={STEPS}", "optimizer.warmup_steps=2"]
    ranks = Ranks(120.0, profile_step)
    print(json.dumps(ranks.run(make_plan(load(args.config, overrides), "cuda"))[0], indent=1))
    ranks.stop()


def profile_step(connection: Connection, plan: Plan, rank: int) -> dict[str, Any]:
    with connected(connection, plan, rank) as runner:
        runner.run(0, STEPS - 1)
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            runner.run(STEPS - 1, 1)
            torch.cuda.synchronize()
    events = profiler.profiler.kineto_results.events()
    kernels = (event for event in events if event.device_type() == torch.autograd.DeviceType.CUDA)
    return breakdown([(event.name(), event.start_ns(), event.start_ns() + event.duration_ns()) for event in kernels])


def breakdown(kernels: list[tuple[str, int, int]]) -> dict[str, Any]:
    """Milliseconds of each kind, and the 15 kernel names that take longest: [milliseconds, number of launches].

    `kernels` are names, starts and ends in ns.
    """
    communication = merge([(a, b) for name, a, b in kernels if "nccl" in name.lower()])
    compute = merge([(a, b) for name, a, b in kernels if "nccl" not in name.lower()])
    union = merge([*communication, *compute])
    busy, step = length(union), union[-1][1] - union[0][0]
    by_name: dict[str, list[int]] = defaultdict(list)
    for name, a, b in kernels:
        by_name[name.partition("(")[0][:70]].append(b - a)
    longest = sorted(by_name.items(), key=lambda item: -sum(item[1]))[:15]
    return {
        "step": step / 1e6,
        "compute": length(compute) / 1e6,
        "communication": length(communication) / 1e6,
        "overlap": (length(compute) + length(communication) - busy) / 1e6,
        "idle": (step - busy) / 1e6,
        "kernels": len(kernels),
        "longest": {name: [sum(times) / 1e6, len(times)] for name, times in longest},
    }


def merge(intervals: Intervals) -> Intervals:
    """The union of the intervals, as disjoint intervals in order."""
    merged: Intervals = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def length(intervals: Intervals) -> int:
    return sum(end - start for start, end in intervals)


if __name__ == "__main__":
    main()
