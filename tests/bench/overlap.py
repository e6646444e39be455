"""Times a forward and a backward of a mixture-of-experts stage on two ranks: interleaved, and one after another.

PYTHONPATH=.typings:tests/support python tests/bench/overlap.py --json OUT

A pair is BW of one microbatch and F of the next. `pair_ms` is its device time and `host_ms` the host's time to issue
it; `nccl_ms` is the time of NCCL kernels, `exposed_ms` the part of it that no compute kernel overlaps. All are of the
slower rank. --links host sends messages through host memory, as between hosts.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from multiprocessing.queues import SimpleQueue
from pathlib import Path

import torch
import torch.distributed as dist
from ranks import spawn
from record import stamp, write

from pentad.schedules.compiler import compile_program
from pentad.schedules.spec.batch import BatchSpec
from pentad.schedules.spec.data import DataSpec, SourceSpec
from pentad.schedules.spec.learning_rate import LearningRate
from pentad.schedules.spec.mesh import Mesh
from pentad.schedules.spec.model import Experts, ModelSpec
from pentad.schedules.spec.optimizer import OptimizerSpec
from pentad.schedules.spec.plan import Plan
from pentad.schedules.spec.tensors import LayerRange
from pentad.workers.model.base_stage import StageInputs
from pentad.workers.model.stage import Stage
from pentad.workers.parallel.async_ops import Task, interleave, on_yield, run_to_completion
from pentad.workers.parallel.context_parallel import ContextParallelGroup
from pentad.workers.parallel.expert_parallel import ExpertParallelGroup
from pentad.workers.parallel.process_groups import LayerGroups
from pentad.workers.parallel.tensor_parallel import TensorParallelGroup
from pentad.workers.params.param_buffers import make_param_buffers
from pentad.workers.params.parameters import create_parameters

RANKS, WARMUP, TIMED, PROFILED = 2, 3, 8, 2
Run = Callable[..., None]
NO_PROFILER = nullcontext()


def make_plan(args: argparse.Namespace) -> Plan:
    """A plan of three stages; only the middle one, which has neither embedding nor head, is run."""
    experts = Experts(args.experts, args.active, args.width, args.width, scoring_func="sigmoid")
    heads = args.hidden // args.head_size
    model = ModelSpec(args.layers + 2, args.hidden, heads, max(1, heads // 8), args.width, 128, experts=experts)
    return Plan(
        name="overlap",
        mesh=Mesh(pp=3, ep=RANKS),
        program=compile_program("1f1b", 3, 3, replicas=RANKS),
        layers=(
            LayerRange(0, 1, has_embedding=True),
            LayerRange(1, args.layers + 1),
            LayerRange(args.layers + 1, args.layers + 2, has_head=True),
        ),
        model=model,
        batch=BatchSpec(3 * RANKS * args.rows, args.length, 3, RANKS),
        optimizer=OptimizerSpec(LearningRate(3e-4, 3e-5, 4, 8), 0.9, 0.95, 1e-8, 0.1, 1.0),
        data=DataSpec((SourceSpec("", ""),)),
        seed=0,
        dtype="bfloat16" if args.device == "cuda" else "float32",
        device=args.device,
        transport="nccl",
        deterministic=False,
    )


def make_stage(args: argparse.Namespace, ep_rank: int, device: torch.device) -> Stage:
    plan = make_plan(args)
    rank = plan.mesh.move(ep_rank, pp=1, ep=ep_rank)
    shards = {
        shard: create_parameters(plan, shard, device, rank=rank, blank=True) for shard in plan.param_shards_of(rank)
    }
    for parameters in shards.values():
        parameters.master.copy_(torch.randn(len(parameters.master), device=device) * 0.02)
        parameters.refresh()
    stage = Stage(plan, 1, make_param_buffers(plan, rank, 1, shards), rank)
    experts = ExpertParallelGroup(dist.group.WORLD, dist.get_world_size(), ep_rank, mode=args.dispatch)
    stage.join(LayerGroups(TensorParallelGroup(), ContextParallelGroup(), experts))
    stage.begin(0, plan.batch.microbatches, plan.batch.tokens)
    return stage


def forward(stage: Stage, microbatch: int, received: torch.Tensor) -> Task[None]:
    yield from stage.forward(microbatch, StageInputs(received))


def backward(stage: Stage, microbatch: int, dy: torch.Tensor) -> Task[None]:
    yield from on_yield(stage.backward_input(microbatch, dy), partial(stage.backward_weight, microbatch))


def in_order(*tasks: Task[None]) -> None:
    for task in tasks:
        run_to_completion(task)


def run_pairs(
    stage: Stage, inputs: torch.Tensor, run: Run, count: int, profiler: AbstractContextManager = NO_PROFILER
) -> list[tuple[float, float]]:
    """(total, host) milliseconds of each pair. `inputs` are the activations and the gradients that a stage receives."""
    times = []
    run_to_completion(forward(stage, 0, inputs[0]))
    with profiler:
        for microbatch in range(count):
            dist.barrier()
            with Clock(inputs.is_cuda) as clock:
                run(backward(stage, microbatch, inputs[1]), forward(stage, microbatch + 1, inputs[0]))
            times.append((clock.total, clock.host))
    run_to_completion(backward(stage, count, inputs[1]))
    return times


class Clock:
    """Milliseconds of a block: `host` until its last call returns, `total` until the device is done."""

    def __init__(self, cuda: bool) -> None:
        self.events = [torch.cuda.Event(enable_timing=True) for _ in range(2 * cuda)]

    def __enter__(self) -> Clock:
        if self.events:
            self.events[0].record()
        self.started = time.monotonic()
        return self

    def __exit__(self, *error: object) -> None:
        self.total = self.host = 1e3 * (time.monotonic() - self.started)
        if self.events:
            self.events[1].record()
            self.events[1].synchronize()
            self.total = self.events[0].elapsed_time(self.events[1])


def profile(stage: Stage, inputs: torch.Tensor, run: Run) -> dict[str, float]:
    """Milliseconds of NCCL kernels in a pair, and the part of them that no other kernel overlaps."""
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
    run_pairs(stage, inputs, run, PROFILED, profiler)
    with tempfile.TemporaryDirectory() as folder:
        profiler.export_chrome_trace(str(Path(folder, "trace")))
        events = json.loads(Path(folder, "trace").read_text())["traceEvents"]
    kernels = [(e["name"], e["ts"], e["ts"] + e["dur"]) for e in events if e.get("cat") == "kernel"]
    nccl = [(a, b) for name, a, b in kernels if "nccl" in name and "AllReduce" not in name]  # the barrier's
    compute = [(a, b) for name, a, b in kernels if "nccl" not in name]
    exposed = union_length(nccl + compute) - union_length(compute)
    scale = 1e-3 / PROFILED
    return {"nccl_ms": scale * union_length(nccl), "exposed_ms": scale * exposed}


def union_length(spans: list[tuple[float, float]]) -> float:
    total, last = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, last))
        last = max(last, end)
    return total


def benchmark(args: argparse.Namespace, rank: int, store: str, results: SimpleQueue) -> None:
    cuda = args.device == "cuda"
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if cuda else "gloo",
        store=dist.FileStore(store, RANKS),
        rank=rank,
        world_size=RANKS,
        device_id=device if cuda else None,
    )
    stage = make_stage(args, rank, device)
    shape = (2, args.rows * args.length, args.hidden)
    inputs = torch.randn(shape, device=device).to(stage.param_buffers[0].parameters.compute.dtype)
    for run in (interleave, in_order):
        run_pairs(stage, inputs, run, WARMUP)
    for run in (interleave, in_order, interleave, in_order):
        times = [statistics.median(each) for each in zip(*run_pairs(stage, inputs, run, TIMED), strict=True)]
        row = dict(zip(("pair_ms", "host_ms"), times, strict=True))
        if cuda:
            row |= profile(stage, inputs, run)
        slowest = torch.tensor(list(row.values()), device=device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        if rank == 0:
            values = [round(value, 3) for value in slowest.tolist()]
            results.put({"run": run.__name__, **dict(zip(row, values, strict=True))})
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"layers": 3, "hidden": 4096, "head_size": 128, "experts": 32, "active": 4, "width": 1536}
    for name, value in (sizes | {"rows": 2, "length": 4096}).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--dispatch", choices=["all_gather", "all_to_all"], default="all_gather")
    parser.add_argument("--links", choices=["direct", "host"], default="direct")
    parser.add_argument("--json", type=Path, help="JSON list that the results are appended to")
    args = parser.parse_args()
    if args.links == "host":
        os.environ["NCCL_P2P_DISABLE"] = "1"
    device = torch.cuda.get_device_name() if args.device == "cuda" else f"{os.cpu_count()} cores"
    cases = spawn(benchmark, args, RANKS)
    if args.json:
        existing = json.loads(args.json.read_text()) if args.json.exists() else []
        write(args.json, [*existing, {**stamp(f"{RANKS} x {device}, torch {torch.__version__}"), "cases": cases}])


if __name__ == "__main__":
    main()
