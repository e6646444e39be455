"""Deviations of instructions and of clocks, measured: DEVIATIONS in orchestrator/simulation/band.py.

PYTHONPATH=.typings:tests/support python tests/bench/jitter.py --json OUT deploy/jobs/llama-8b.yaml OVERRIDE ...

The logarithm of an instruction's seconds is that of its median over steps, plus what the rank has in the step (the mean
of all its instructions, weighted by their seconds), plus what is left. Before the run every GPU multiplies matrices for
--burn seconds, from cold: --device cpu leaves it out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ranks import Ranks, connected
from record import stamp, write

from pentad.orchestrator.config.config import load
from pentad.orchestrator.planning.planning import make_plan
from pentad.schedules.simulate.timeline import Span
from pentad.schedules.spec.plan import Plan
from pentad.workers.health.gpu_facts import facts_of, index_of

SIZE, ROUND = 8192, 10  # of the matrices, and products between two readings of the clock
WARM_UP = 8  # steps that do not count
LEAST_SECONDS = 1e-3  # of an instruction, for it to count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--burn", type=float, default=40.0)
    parser.add_argument("--append", action="store_true", help="to the runs in the file")
    args, (path, *overrides) = parser.parse_known_args()
    plan = make_plan(load(Path(path), overrides), args.device)
    ranks = Ranks(300.0, partial(work, args.burn if args.device == "cuda" else 0.0))
    answers = ranks.run(plan)
    ranks.stop()
    steps = [[answer[0][step] for answer in answers] for step in range(WARM_UP, len(answers[0][0]))]
    row = {"config": path, "overrides": overrides, "mesh": str(plan.mesh), "gpu": answers[0][2]}
    row |= {"burn": [answer[1] for answer in answers], **deviations(steps)}
    print(json.dumps(row), flush=True)
    earlier = json.loads(args.json.read_text())["runs"] if args.append and args.json.exists() else []
    write(args.json, {**stamp(), "runs": [*earlier, row]})


def work(burn_seconds: float, connection: Connection, plan: Plan, rank: int) -> Any:
    """(spans of each step, rates of the burn, the device's name) of a rank."""
    with connected(connection, plan, rank) as runner:
        burned = burn(burn_seconds) if burn_seconds else []
        results = runner.run(0, plan.optimizer.learning_rate.decay_steps)
    name = torch.cuda.get_device_name() if plan.device == "cuda" else "CPU"
    return [result.spans for result in results], burned, name


def burn(seconds: float) -> list[tuple[float, float, float]]:
    """(seconds since the start, FLOP/s since the last row, SM clock in hertz) of products of random values."""
    a, b = (torch.randn(SIZE, SIZE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    number = index_of(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
    torch.mm(a, b)
    torch.cuda.synchronize()
    time.sleep(5.0)
    rows = list[tuple[float, float, float]]()
    began = last = time.monotonic()
    while last < began + seconds:
        for _ in range(ROUND * (1 if len(rows) < 10 else 10)):
            torch.mm(a, b)
        clock = facts_of(number).clock or 0.0  # while the GPU works
        torch.cuda.synchronize()
        now = time.monotonic()
        count = ROUND * (1 if len(rows) < 10 else 10)
        rows.append((round(now - began, 3), 2 * SIZE**3 * count / (now - last), clock))
        last = now
    return rows


def deviations(steps: Sequence[Sequence[Sequence[Span]]]) -> dict[str, Any]:
    """For `steps[step][rank]`: standard deviations of the logarithm of seconds, of an `instruction` by rank and by op,
    and of a rank in a `step`; and the 5, 50 and 95 % quantiles of steps in seconds."""
    kinds = defaultdict[tuple[int, str], list[list[float]]](list)  # rank, op: seconds of each instruction in each step
    for rank in range(len(steps[0])):
        by_name = defaultdict[tuple[str, str], list[float]](list)
        for ranks in steps:
            for span in (span for span in ranks[rank] if span.op in ("F", "B", "W", "BW")):
                by_name[span.name, span.op].append(span.end - span.start)
        for (_, op), took in by_name.items():
            if statistics.median(took) > LEAST_SECONDS:
                kinds[rank, op].append(took)
    found: dict[str, Any] = {"steps": len(steps), "instruction": {}, "by_op": {}, "step": {}}
    for rank in sorted({rank for rank, _ in kinds}):
        seconds = np.array([took for (of, _), its in kinds.items() if of == rank for took in its])
        usual = np.median(seconds, axis=1, keepdims=True)
        logs = np.log(seconds / usual)
        of_step = (usual * logs).sum(axis=0) / usual.sum()
        found["step"][rank] = float(of_step.std())
        found["instruction"][rank] = float((logs - of_step).std())
        ops = np.array([op for (of, op), its in kinds.items() if of == rank for _ in its])
        for op in dict.fromkeys(ops.tolist()):
            found["by_op"][f"{rank} {op}"] = float((logs - of_step)[ops == op].std())
    starts = [min(span.start for spans in ranks for span in spans) for ranks in steps]
    found["step_seconds"] = [float(each) for each in np.quantile(np.diff(starts), (0.05, 0.5, 0.95))]
    return found


if __name__ == "__main__":
    main()
