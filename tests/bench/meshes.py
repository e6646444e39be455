"""Trains configurations on meshes of one host without Ray: losses, tokens/s, memory planned and measured.

PYTHONPATH=.typings:tests/support python tests/bench/meshes.py --out OUT deploy/jobs/llama-8b.yaml mesh.tp=4 -- \\
    deploy/jobs/llama-8b.yaml mesh.tp=1 mesh.pp=4 schedule.name=zb-h2
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing as mp
import platform
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from itertools import groupby, pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from pentad.orchestrator.config.config import load
from pentad.orchestrator.planning.estimate import memory, mfu
from pentad.orchestrator.planning.planning import make_plan
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.spec.plan import Plan

WARM = 4  # steps that are not timed
Work = Callable[[Connection, Plan, int], Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds a run may take")
    known, rest = parser.parse_known_args()
    runs = [list(words) for is_end, words in groupby(rest, lambda word: word == "--") if not is_end]
    ranks, rows = Ranks(known.limit, trained), list[dict[str, Any]]()
    for path, *overrides in runs:
        began = time.monotonic()
        try:
            plan = make_plan(load(Path(path), overrides), known.device)
            row = facts(plan, ranks.run(plan))
        except PentadError as error:
            row = {"error": str(error)}
        row = {"config": path, "overrides": overrides, **row, "wall_seconds": round(time.monotonic() - began, 1)}
        rows.append(row)
        print(json.dumps({key: value for key, value in row.items() if key not in ("losses", "norms")}), flush=True)
        if known.out:
            command = "PYTHONPATH=.typings:tests/support python tests/bench/meshes.py " + " ".join(sys.argv[1:])
            stamp = {"command": command, "date": f"{datetime.now():%Y-%m-%d %H:%M}", "machine": platform.node()}
            known.out.write_text(json.dumps({**stamp, "runs": rows}, indent=1) + "\n")
    ranks.stop()


class Ranks:
    """Processes that outlive a run, as many as the largest mesh so far has needed; `work` is what each does of it."""

    def __init__(self, limit: float, work: Work) -> None:
        self.limit, self.work = limit, work
        self.ends: list[Connection] = []
        self.processes: list[Any] = []

    def run(self, plan: Plan) -> list[Any]:
        """Of each rank its results, the most that its device had allocated, and its name; PentadError if one fails."""
        context = mp.get_context("spawn")
        while len(self.ends) < plan.mesh.size:
            here, there = context.Pipe()
            process = context.Process(target=serve, args=(there, self.work), daemon=True)
            process.start()
            self.ends.append(here)
            self.processes.append(process)
        ends = self.ends[: plan.mesh.size]
        for rank, end in enumerate(ends):
            end.send((plan, rank))
        address = self._heard(ends[0])
        for end in ends:
            end.send(address)
        answers = [self._heard(end) for end in ends]
        failed = [f"rank {rank}: {answer}" for rank, answer in enumerate(answers) if isinstance(answer, str)]
        if failed:
            self.stop()
            self.ends, self.processes = [], []
            raise PentadError(failed[0])
        return answers

    def stop(self) -> None:
        for end, process in zip(self.ends, self.processes, strict=True):
            end.close()
            process.join(5)
            process.kill()

    def _heard(self, end: Connection) -> Any:
        try:
            return end.recv() if end.poll(self.limit) else f"no answer in {self.limit:g} s"
        except EOFError:
            return "it died"


def serve(end: Connection, work: Work) -> None:
    while True:
        try:
            order = end.recv()
            if not isinstance(order, str):
                end.send(work(end, *order))
        except EOFError:
            return
        except BaseException:
            end.send(traceback.format_exc())


@contextmanager
def connected(end: Connection, plan: Plan, rank: int) -> Iterator[Any]:
    """The Runner of a rank, which has met the others."""
    import torch
    from gpus import gpu_of

    from pentad.workers.runtime.runner import Runner

    gpu = gpu_of(rank)
    if plan.device == "cuda":
        torch.cuda.set_device(gpu)
        torch.cuda.reset_peak_memory_stats()
    with tempfile.TemporaryDirectory() as folder:
        runner = Runner(plan, rank, Path(folder, "board"), gpu=gpu)
        if rank == 0:
            end.send(runner.serve("127.0.0.1", 60))
        runner.connect(end.recv(), 60)
        yield runner
        runner.close()


def trained(end: Connection, plan: Plan, rank: int) -> Any:
    import torch

    cuda = plan.device == "cuda"
    with connected(end, plan, rank) as runner:
        results = runner.run(0, plan.optimizer.steps)
    peak = torch.cuda.max_memory_allocated() if cuda else 0
    del runner
    gc.collect()
    if cuda:
        torch.cuda.empty_cache()
    return results, peak, torch.cuda.get_device_name() if cuda else "CPU"


def facts(plan: Plan, answers: list[Any]) -> dict[str, Any]:
    results, peaks, names = zip(*answers, strict=True)
    starts = [min(span.start for of in results for span in of[step].spans) for step in range(plan.optimizer.steps)]
    timed = range(WARM, plan.optimizer.steps)
    seconds = statistics.median(b - a for a, b in pairwise(starts[WARM:]))
    pace = plan.batch.tokens / seconds
    planned = [memory(plan, rank)["total"] for rank in range(plan.mesh.size)]
    fullest = max(range(plan.mesh.size), key=lambda rank: peaks[rank])
    losses = [
        sum({n: loss for of in results for n, loss in of[step].losses.items()}.values()) / plan.batch.tokens
        for step in range(plan.optimizer.steps)
    ]
    return {
        "mesh": str(plan.mesh),
        "schedule": plan.program.name,
        "zero": plan.zero,
        "recompute": sorted(set(plan.recompute)),
        "device": names[0],
        "step_seconds": round(seconds, 4),
        "host_seconds": round(max(statistics.median(of[step].host_seconds for step in timed) for of in results), 4),
        "tokens_per_second_per_gpu": round(pace / plan.mesh.size, 1),
        "mfu": mfu(pace, plan, names[0]),
        "peak_gib": round(peaks[fullest] / 2**30, 2),
        "planned_gib": round(planned[fullest] / 2**30, 2),
        "planned_over_peak": [round(p / max(1, peak), 4) for p, peak in zip(planned, peaks, strict=True)],
        "first_loss": round(losses[0], 5),
        "last_loss": round(losses[-1], 5),
        "losses": [round(loss, 5) for loss in losses],
        "norms": [float(f"{result.grad_norm:.5g}") for result in results[0]],
    }


if __name__ == "__main__":
    main()
