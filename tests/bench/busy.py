"""Where the time of a step goes on the GPU of rank 0: kernels that compute, NCCL's, both at once, neither.

PYTHONPATH=.typings:tests/support python tests/bench/busy.py deploy/jobs/llama-8b.yaml mesh.tp=2 model.layers=12

Copies count as computing. `waits` is time in which nothing runs: the host is late, or another rank.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from meshes import Ranks, connected

from pentad.orchestrator.config.config import load
from pentad.orchestrator.planning.planning import make_plan
from pentad.schedules.spec.plan import Plan

Intervals = list[tuple[int, int]]  # starts and ends, ns
STEPS = 6  # the last one is looked at


def main() -> None:
    path, *overrides = sys.argv[1:]
    plan = make_plan(load(Path(path), [*overrides, f"run.steps={STEPS}", "optimizer.warmup_steps=2"]), "cuda")
    ranks = Ranks(120.0, profiled)
    print(json.dumps(ranks.run(plan)[0], indent=1))
    ranks.stop()


def profiled(end: Connection, plan: Plan, rank: int) -> dict[str, Any]:
    import torch
    from torch.profiler import ProfilerActivity, profile

    with connected(end, plan, rank) as runner:
        runner.run(0, STEPS - 1)
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            runner.run(STEPS - 1, 1)
            torch.cuda.synchronize()
    events = seen.profiler.kineto_results.events()
    mine = (event for event in events if event.device_type() == torch.autograd.DeviceType.CUDA)
    return shares([(event.name(), event.start_ns(), event.start_ns() + event.duration_ns()) for event in mine])


def shares(kernels: list[tuple[str, int, int]]) -> dict[str, Any]:
    """Milliseconds of each kind, and of the kernels that take longest together, with how often they run."""
    messages = merged([(a, b) for name, a, b in kernels if "nccl" in name.lower()])
    compute = merged([(a, b) for name, a, b in kernels if "nccl" not in name.lower()])
    every = merged([*messages, *compute])
    busy, whole = length(every), every[-1][1] - every[0][0]
    by_name: dict[str, list[int]] = defaultdict(list)
    for name, a, b in kernels:
        by_name[name.partition("(")[0][:70]].append(b - a)
    longest = sorted(by_name.items(), key=lambda item: -sum(item[1]))[:15]
    return {
        "step": whole / 1e6,
        "compute": length(compute) / 1e6,
        "messages": length(messages) / 1e6,
        "both": (length(compute) + length(messages) - busy) / 1e6,
        "waits": (whole - busy) / 1e6,
        "kernels": len(kernels),
        "longest": {name: [sum(times) / 1e6, len(times)] for name, times in longest},
    }


def merged(intervals: Intervals) -> Intervals:
    """The same time without overlaps, in order."""
    found: Intervals = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found


def length(intervals: Intervals) -> int:
    return sum(end - start for start, end in intervals)


if __name__ == "__main__":
    main()
