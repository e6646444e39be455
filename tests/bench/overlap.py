"""Times a forward and a backward of a stage with experts on two ranks: as a pair, by turns, and one after the other.

PYTHONPATH=.typings python -P tests/bench/overlap.py --json OUT

A pair is BW of one microbatch and F of the next. `pair_ms` is device time between events, `host_ms` what issuing
takes, both of the slower rank; of the time that NCCL's kernels run, `exposed_ms` is what no other kernel runs beside.
With --links host the ranks' messages go through memory of the host, as between hosts.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import UTC, datetime
from functools import partial
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pentad.schedules.compiler import compile_program
from pentad.schedules.spec.mesh import Mesh
from pentad.schedules.spec.model import Experts, ModelSpec
from pentad.schedules.spec.plan import BatchSpec, OptimizerSpec, Plan
from pentad.workers.model.stage import Stage
from pentad.workers.parallel.async_ops import Task, interleave, on_yield, run_to_completion
from pentad.workers.parallel.context_parallel import ContextParallelGroup
from pentad.workers.parallel.expert_parallel import ExpertParallelGroup
from pentad.workers.parallel.process_groups import LayerGroups
from pentad.workers.parallel.tensor_parallel import TensorParallelGroup
from pentad.workers.params.param_buffers import make_param_buffers
from pentad.workers.params.parameters import create_parameters

RANKS, WARM, TIMED, TRACED = 2, 3, 8, 2
Run = Callable[..., None]
UNWATCHED = nullcontext()


def plan_of(args: argparse.Namespace) -> Plan:
    """Three stages, of which the middle one is run."""
    experts = Experts(args.experts, args.active, args.width, args.width, scoring_func="sigmoid")
    heads = args.hidden // args.head_size
    model = ModelSpec(args.layers + 2, args.hidden, heads, max(1, heads // 8), args.width, 128, experts=experts)
    return Plan(
        name="overlap",
        mesh=Mesh(pp=3, ep=RANKS),
        program=compile_program("1f1b", 3, 3, replicas=RANKS),
        layers=((0, 1), (1, args.layers + 1), (args.layers + 1, args.layers + 2)),
        model=model,
        batch=BatchSpec(3 * RANKS * args.rows, args.length, 3, RANKS),
        optimizer=OptimizerSpec(3e-4, 3e-5, 4, 8, 0.9, 0.95, 1e-8, 0.1, 1.0),
        data="",
        cache="",
        seed=0,
        dtype="bfloat16" if args.device == "cuda" else "float32",
        device=args.device,
        transport="nccl",
        deterministic=False,
    )


def stage_of(args: argparse.Namespace, number: int, device: torch.device) -> Stage:
    plan = plan_of(args)
    rank = plan.mesh.move(number, pp=1, ep=number)
    held = {
        share: create_parameters(plan, share, device, rank=rank, blank=True) for share in plan.param_shards_of(rank)
    }
    for parameters in held.values():
        parameters.master.normal_(0, 0.02)
        parameters.refresh()
    stage = Stage(plan, 1, make_param_buffers(plan, rank, 1, held), rank)
    stage.join(
        LayerGroups(
            TensorParallelGroup(), ContextParallelGroup(), ExpertParallelGroup(dist.group.WORLD, number, args.way)
        )
    )
    stage.begin(0)
    return stage


def forward(stage: Stage, microbatch: int, received: torch.Tensor) -> Task[None]:
    yield from stage.forward(microbatch, received, None, None)


def backward(stage: Stage, microbatch: int, dy: torch.Tensor) -> Task[None]:
    yield from on_yield(stage.backward_input(microbatch, dy), partial(stage.backward_weight, microbatch))


def in_order(*works: Task[None]) -> None:
    for work in works:
        run_to_completion(work)


def pairs(
    stage: Stage, streams: torch.Tensor, run: Run, count: int, watched: AbstractContextManager = UNWATCHED
) -> list[tuple[float, float]]:
    """(all, the host's) milliseconds of each."""
    found = []
    run_to_completion(forward(stage, 0, streams[0]))
    with watched:
        for number in range(count):
            dist.barrier()
            with Clock(streams.is_cuda) as clock:
                run(backward(stage, number, streams[1]), forward(stage, number + 1, streams[0]))
            found.append((clock.all, clock.host))
    run_to_completion(backward(stage, count, streams[1]))
    return found


class Clock:
    """Milliseconds inside: `host` until the last call is back, `all` until the device is ready."""

    def __init__(self, cuda: bool) -> None:
        self.marks = [torch.cuda.Event(enable_timing=True) for _ in range(2 * cuda)]

    def __enter__(self) -> Clock:
        if self.marks:
            self.marks[0].record()
        self.started = time.monotonic()
        return self

    def __exit__(self, *error: object) -> None:
        self.all = self.host = 1e3 * (time.monotonic() - self.started)
        if self.marks:
            self.marks[1].record()
            self.marks[1].synchronize()
            self.all = self.marks[0].elapsed_time(self.marks[1])


def traced(stage: Stage, streams: torch.Tensor, run: Run) -> dict[str, float]:
    """What the kernels of operations between ranks take of a pair, and how much of that nothing else runs beside."""
    profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
    pairs(stage, streams, run, TRACED, profile)
    with tempfile.TemporaryDirectory() as folder:
        profile.export_chrome_trace(str(Path(folder, "trace")))
        events = json.loads(Path(folder, "trace").read_text())["traceEvents"]
    kernels = [(e["name"], e["ts"], e["ts"] + e["dur"]) for e in events if e.get("cat") == "kernel"]
    between_ranks = [(a, b) for name, a, b in kernels if "nccl" in name and "AllReduce" not in name]
    others = [(a, b) for name, a, b in kernels if "nccl" not in name]
    everything, alone_ms = covered(between_ranks + others), covered(others)
    scale = 1e-3 / TRACED
    return {"nccl_ms": scale * covered(between_ranks), "exposed_ms": scale * (everything - alone_ms)}


def covered(spans: list[tuple[float, float]]) -> float:
    """The length of the union."""
    total, last = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, last))
        last = max(last, end)
    return total


def serve(args: argparse.Namespace, number: int, store: str, results: SimpleQueue) -> None:
    cuda = args.device == "cuda"
    device = torch.device("cuda", number) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(number)
    dist.init_process_group(
        "nccl" if cuda else "gloo",
        store=dist.FileStore(store, RANKS),
        rank=number,
        world_size=RANKS,
        device_id=device if cuda else None,
    )
    stage = stage_of(args, number, device)
    size = (2, args.rows * args.length, args.hidden)
    streams = torch.randn(size, device=device).to(stage.param_buffers[0].parameters.compute.dtype)
    for run in (interleave, in_order):
        pairs(stage, streams, run, WARM)
    for run in (interleave, in_order, interleave, in_order):
        times = [statistics.median(each) for each in zip(*pairs(stage, streams, run, TIMED), strict=True)]
        found = dict(zip(("pair_ms", "host_ms"), times, strict=True))
        if cuda:
            found |= traced(stage, streams, run)
        worst = torch.tensor(list(found.values()), device=device)
        dist.all_reduce(worst, dist.ReduceOp.MAX)
        if number == 0:
            values = [round(value, 3) for value in worst.tolist()]
            results.put({"run": run.__name__, **dict(zip(found, values, strict=True))})
    dist.destroy_process_group()


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    if args.links == "host":
        os.environ["NCCL_P2P_DISABLE"] = "1"
    context = mp.get_context("spawn")
    results = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder, "store"))
        spawned = [context.Process(target=serve, args=(args, number, store, results)) for number in range(RANKS)]
        for each in spawned:
            each.start()
        for each in spawned:
            each.join()
    found = []
    while not results.empty():
        found.append(results.get())
        print(json.dumps(found[-1]), flush=True)
    if any(each.exitcode for each in spawned):
        raise SystemExit(1)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    sizes = {"layers": 3, "hidden": 4096, "head_size": 128, "experts": 32, "active": 4, "width": 1536}
    for name, value in (sizes | {"rows": 2, "length": 4096}).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--way", choices=["all_gather", "all_to_all"], default="all_gather")
    parser.add_argument("--links", choices=["direct", "host"], default="direct")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    what = torch.cuda.get_device_name() if args.device == "cuda" else f"{os.cpu_count()} cores"
    facts = {
        "command": f"PYTHONPATH=.typings python -P {' '.join(sys.argv)}",
        "machine": f"{RANKS} x {what}, torch {torch.__version__}",
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
    }
    cases = measure(args)
    if args.json:
        there = json.loads(args.json.read_text()) if args.json.exists() else []
        args.json.write_text(json.dumps([*there, facts | {"cases": cases}], indent=1) + "\n")


if __name__ == "__main__":
    main()
