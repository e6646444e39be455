"""Times every schedule on the GPUs of one host without Ray: tokens/s, bubbles planned and measured, host time.

PYTHONPATH=.typings python -P tests/bench/pipeline.py --ranks 4 --microbatches 16 --steps 12 --json OUT
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import statistics
import tempfile
import time
import traceback
from itertools import pairwise
from pathlib import Path
from typing import Any

from pentad.orchestrator.planning.estimate import read_costs
from pentad.schedules.compiler import compile_program
from pentad.schedules.ir.instruction import Instruction
from pentad.schedules.simulate.simulate import simulate
from pentad.schedules.simulate.timeline import Timeline
from pentad.schedules.spec.mesh import Mesh
from pentad.schedules.spec.model import ModelSpec
from pentad.schedules.spec.plan import BatchSpec, OptimizerSpec, Plan, split_layers
from pentad.schedules.spec.tensors import head_in_layers
from pentad.workers.parallel.async_ops import Task
from pentad.workers.runtime.executor import Executor

MODELS = {
    "1b": ModelSpec(layers=16, hidden=2048, heads=32, kv_heads=8, ffn=8192, vocab=128256, rope_theta=5e5),
    "tiny": ModelSpec(layers=8, hidden=128, heads=8, kv_heads=4, ffn=384, vocab=4096),
}


def plan_of(args: argparse.Namespace, name: str) -> Plan:
    model = MODELS[args.model]
    program = compile_program(name, args.ranks, args.microbatches, gated=args.transport == "nccl")
    return Plan(
        name=name,
        mesh=Mesh(pp=args.ranks),
        program=program,
        layers=split_layers(model.layers, program.placement, head_in_layers(model, args.length)),
        model=model,
        batch=BatchSpec(args.microbatches * args.rows, args.length, args.microbatches, 1),
        optimizer=OptimizerSpec(3e-4, 3e-5, 4, args.steps, 0.9, 0.95, 1e-8, 0.1, 1.0),
        data="builtin:pydoc",
        cache="~/.cache/pentad",
        seed=0,
        dtype=args.dtype,
        device=args.device,
        transport=args.transport,
        deterministic=not args.fastest,
    )


def serve(plan: Plan, rank: int, end) -> None:
    from pentad.workers.runtime.runner import Runner

    try:
        with tempfile.TemporaryDirectory() as folder:
            runner = Runner(plan, rank, Path(folder, "board"), gpu=rank)
            if rank == 0:
                end.send(runner.serve("127.0.0.1", 60))
            runner.connect(end.recv(), 60)
            first = runner.run(0, 2)
            assert runner.executor is not None
            inside = watch(runner.executor)
            results = runner.run(2, plan.optimizer.steps - 2)
            issued = sum(result.instructions for result in results)
            around = sum(result.host_seconds for result in results) - sum(map(sum, inside.values()))
            host = {op: 1e6 * statistics.median(seconds) for op, seconds in inside.items()}
            end.send((first + results, host | {"around": 1e6 * around / issued}))
            runner.close()
    except BaseException:
        end.send(traceback.format_exc())


def watch(executor: Executor) -> dict[str, list[float]]:
    """Host seconds that each kind of instruction takes to issue; the loop, the lanes and the events are around it."""
    inside: dict[str, list[float]] = {}
    execute = executor._execute

    def timed(part: Instruction) -> Task[None]:
        turns, spent, ended = execute(part), 0.0, None
        while not ended:
            started = time.monotonic()
            ended = next(turns, "ended")
            spent += time.monotonic() - started
            if not ended:
                yield
        inside.setdefault(part.op.value, []).append(spent)

    executor._execute = timed  # type: ignore[method-assign]
    return inside


def measure(args: argparse.Namespace, name: str) -> dict:
    plan = plan_of(args, name)
    context = mp.get_context("spawn")
    ends, processes = [], []
    for rank in range(plan.mesh.size):
        here, there = context.Pipe()
        process = context.Process(target=serve, args=(plan, rank, there), daemon=True)
        process.start()
        ends.append(here)
        processes.append(process)
    address = ends[0].recv() if ends[0].poll(args.limit) else ""
    for end in ends:
        end.send(address)
    answers: list[Any] = [end.recv() if end.poll(args.limit) else f"no answer in {args.limit} s" for end in ends]
    for process in processes:
        process.join(10)
        process.kill()
    failed = [f"rank {rank}: {answer}" for rank, answer in enumerate(answers) if isinstance(answer, str)]
    if failed:
        return {"schedule": name, "error": failed[0]}
    return facts(args, plan, [answer for answer, _ in answers]) | {
        "host_us": [host for _, host in answers][1 % len(answers)]
    }


def facts(args: argparse.Namespace, plan: Plan, answers: list) -> dict:
    steps = range(4, args.steps)
    spans = {step: [s for answer in answers for s in answer[step].spans] for step in steps}
    starts = {step: min(s.start for s in spans[step]) for step in steps}
    seconds = statistics.median(b - a for a, b in pairwise(starts.values()))
    lines = [Timeline("measured", tuple(spans[step])) for step in steps]
    costs = read_costs(plan.program, Timeline("measured", tuple(s for step in steps for s in spans[step])))
    assert costs is not None
    planned = simulate(plan.program, costs)
    return {
        "schedule": plan.program.name,
        "step_seconds": seconds,
        "tokens_per_second_per_gpu": plan.batch.tokens / seconds / plan.mesh.size,
        "bubble_measured": statistics.median(line.bubble().makespan for line in lines),
        "bubble_simulated": planned.bubble().makespan,
        "makespan_measured": statistics.median(line.makespan for line in lines),
        "makespan_simulated": planned.makespan,
        "losses": [
            sum(x for a in answers for x in a[s].losses.values()) / plan.batch.tokens for s in range(args.steps)
        ],
        "peak_gib": max(a[-1].peak_bytes for a in answers) / 2**30,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=MODELS, default="1b")
    parser.add_argument("--schedules", default="gpipe,1f1b,zb-h1,zb-h2,dualpipe")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=16)
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--limit", type=float, default=90.0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--transport", default="peer")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--fastest", action="store_true", help="kernels that may differ in the last bits between runs")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = []
    for name in args.schedules.split(","):
        row = measure(args, name)
        rows.append(row)
        shown = {k: (round(v, 4) if isinstance(v, float) else v) for k, v in row.items() if k != "losses"}
        print(shown, "last loss", row.get("losses", [None])[-1], flush=True)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
