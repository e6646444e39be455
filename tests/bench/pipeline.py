"""Times schedules on the GPUs of one host without Ray: tokens/s, simulated and measured bubbles, host time.

PYTHONPATH=.typings:tests/support python tests/bench/pipeline.py --ranks 4 --microbatches 16 --steps 12 --json OUT
"""

from __future__ import annotations

import argparse
import statistics
import time
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from ranks import Ranks, connected
from record import write

from pentad.schedules.compiler import compile_program
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.ir.instruction import Instruction
from pentad.schedules.simulate.read_costs import read_costs
from pentad.schedules.simulate.simulate import simulate
from pentad.schedules.simulate.timeline import Timeline
from pentad.schedules.spec.batch import BatchSpec
from pentad.schedules.spec.data import DataSpec, SourceSpec
from pentad.schedules.spec.learning_rate import LearningRate
from pentad.schedules.spec.mesh import Mesh
from pentad.schedules.spec.model import ModelSpec
from pentad.schedules.spec.optimizer import OptimizerSpec
from pentad.schedules.spec.plan import Plan, split_layers
from pentad.schedules.spec.tensors import head_in_layers
from pentad.workers.parallel.async_ops import Task
from pentad.workers.runtime.executor import Executor
from pentad.workers.runtime.results import StepResult

MODELS = {
    "1b": ModelSpec(layers=16, hidden=2048, heads=32, kv_heads=8, ffn=8192, vocab=128256, rope_theta=5e5),
    "tiny": ModelSpec(layers=8, hidden=128, heads=8, kv_heads=4, ffn=384, vocab=4096),
}


def make_plan(args: argparse.Namespace, name: str) -> Plan:
    model = MODELS[args.model]
    program = compile_program(name, args.ranks, args.microbatches, gated=args.transport == "nccl")
    return Plan(
        name=name,
        mesh=Mesh(pp=args.ranks),
        program=program,
        layers=split_layers(model.layers, program.placement, head_in_layers(model, args.length)),
        model=model,
        batch=BatchSpec(args.microbatches * args.rows, args.length, args.microbatches, 1),
        optimizer=OptimizerSpec(LearningRate(3e-4, 3e-5, 4, args.steps), 0.9, 0.95, 1e-8, 0.1, 1.0),
        data=DataSpec((SourceSpec("pydoc", "builtin:pydoc"),), "~/.cache/pentad"),
        seed=0,
        dtype=args.dtype,
        device=args.device,
        transport=args.transport,
        deterministic=not args.fastest,
    )


def train(connection: Connection, plan: Plan, rank: int) -> tuple[list[StepResult], dict[str, float]]:
    """The results of the steps, and the median host microseconds to issue an instruction, by op. `overhead` is the rest
    of the host's time per instruction: the loop, the lanes and the events."""
    with connected(connection, plan, rank) as runner:
        results = runner.run(0, 2)
        assert runner.executor is not None
        seconds = time_instructions(runner.executor)
        timed = runner.run(2, plan.optimizer.learning_rate.decay_steps - 2)
    overhead = sum(result.host_seconds for result in timed) - sum(map(sum, seconds.values()))
    host = {op: 1e6 * statistics.median(values) for op, values in seconds.items()}
    return results + timed, host | {"around": 1e6 * overhead / sum(result.instructions for result in timed)}


def time_instructions(executor: Executor) -> dict[str, list[float]]:
    """Host seconds to issue each instruction, by op; filled as the executor runs."""
    seconds: dict[str, list[float]] = {}
    execute = executor._execute

    def timed(part: Instruction) -> Task[None]:
        task, spent, ended = execute(part), 0.0, None
        while not ended:
            started = time.monotonic()
            ended = next(task, "ended")
            spent += time.monotonic() - started
            if not ended:
                yield
        seconds.setdefault(part.op.value, []).append(spent)

    executor._execute = timed  # type: ignore[method-assign]
    return seconds


def summarize(args: argparse.Namespace, plan: Plan, answers: list[list[StepResult]]) -> dict[str, Any]:
    steps = range(4, args.steps)
    spans = [tuple(span for answer in answers for span in answer[step].spans) for step in steps]
    seconds = statistics.median(b - a for a, b in pairwise(min(span.start for span in step) for step in spans))
    timelines = [Timeline("measured", step) for step in spans]
    costs = read_costs(plan.program, Timeline("measured", tuple(span for step in spans for span in step)))
    assert costs is not None
    simulated = simulate(plan.program, costs)
    return {
        "schedule": plan.program.name,
        "step_seconds": seconds,
        "tokens_per_second_per_gpu": plan.batch.tokens / seconds / plan.mesh.size,
        "bubble_measured": statistics.median(each.bubble().makespan for each in timelines),
        "bubble_simulated": simulated.bubble().makespan,
        "makespan_measured": statistics.median(each.makespan for each in timelines),
        "makespan_simulated": simulated.makespan,
        "losses": [
            sum(x for a in answers for x in a[s].losses.values()) / plan.batch.tokens for s in range(args.steps)
        ],
        "peak_gib": max(a[-1].peak_bytes for a in answers) / 2**30,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="1b")
    parser.add_argument("--schedules", default="gpipe,1f1b,zb-h1,zb-h2,dualpipe")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=16)
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--limit", type=float, default=90.0, help="time limit of a run, in seconds")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--transport", default="peer")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--fastest", action="store_true", help="allow kernels whose last bits differ between runs")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    ranks, rows = Ranks(args.limit, train), list[dict[str, Any]]()
    for name in args.schedules.split(","):
        plan = make_plan(args, name)
        try:
            results, host = zip(*ranks.run(plan), strict=True)
            row = summarize(args, plan, list(results)) | {"host_us": host[1 % len(host)]}
        except PentadError as error:
            row = {"schedule": name, "error": str(error)}
        rows.append(row)
        shown = {k: (round(v, 4) if isinstance(v, float) else v) for k, v in row.items() if k != "losses"}
        print(shown, "last loss", row.get("losses", [None])[-1], flush=True)
    ranks.stop()
    write(args.json, rows)


if __name__ == "__main__":
    main()
