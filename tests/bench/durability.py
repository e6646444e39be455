"""What copies in memory and checkpoints cost training, and how long a killed rank stops it, on two GPUs of one host.

PYTHONPATH=.typings:tests/support:tests/bench python -P tests/bench/durability.py cost --json OUT
PYTHONPATH=.typings:tests/support:tests/bench python -P tests/bench/durability.py kill --json OUT

cost: in one group of ranks, steps of Llama 3 8B with fewer layers, in turn without anything, with a copy in the other
rank's memory, and with a checkpoint, made beside them. Needs no Ray.
kill: a run of `pentad train` with a model of 1.5 billion parameters, or with --job another, whose ranks are killed in
turn: seconds from the signal to the next committed step. Needs Ray (a folder of it in PYTHONPATH will do).

Further arguments are overrides of the configuration: `model.layers=2`, or `cluster.device=cpu` with a small model.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from memory_copies import Copies
from record import record
from worker_processes import WorkerProcess, call_all, start_run

from pentad.orchestrator.config.config import load
from pentad.orchestrator.control.control_client import connect
from pentad.orchestrator.planning.planning import make_plan
from pentad.orchestrator.records.json_lines import read_lines
from pentad.schedules.spec.tensors import num_parameters
from pentad.workers.checkpoint.checkpoint import folder_of

ROOT = Path(__file__).parents[2]
KINDS = ("copy", "checkpoint")
SECONDS = 240.0  # for one answer: the first step compiles kernels
COST = [
    *("run.name=cost", "model.layers=4", "mesh.tp=1", "mesh.dp=2", "zero.stage=1", "schedule.microbatches=8"),
    *("batch.global_batch_size=16", "data.holdout=0", "eval.every=0", "precision.deterministic=true"),
]
KILL = [
    *("run.name=kill", "mesh.pp=1", "mesh.dp=2", "schedule.name=1f1b", "schedule.microbatches=8", "run.steps=1000000"),
    *("checkpoint.every=0", "checkpoint.every_seconds=0", "elastic.hang_seconds=5", "cluster.auth=disabled"),
    *("cluster.dashboard=false", "data.holdout=0", "eval.every=0"),
]
COPY = ("step", "seconds", "snapshot_seconds", "transfer_seconds", "steps_meanwhile", "bytes")  # facts of the journal


class Trial:
    """A group of ranks that trains `steps` steps at a time."""

    def __init__(self, ranks: list[WorkerProcess], plan: Any, steps: int, folder: Path) -> None:
        self.ranks, self.steps, self.folder, self.done = ranks, steps, folder, 0
        start_run(ranks, plan)
        self.copies = Copies(ranks, "AB")
        call_all(ranks, "run", 0, 2, seconds=SECONDS)
        self.done = 2

    def run(self, kind: str) -> dict[str, Any]:
        """Seconds a step, and facts about what was made meanwhile."""
        step, asked = self.done, list[tuple[WorkerProcess, int]]()
        began = time.monotonic()
        if kind == "copy":
            asked = self.copies.submit(1, step)
        if kind == "checkpoint":
            for worker in self.ranks:
                worker.call("snapshot", step)
                asked.append((worker, worker.call_beside("write", str(folder_of(self.folder, step)), step)))
        call_all(self.ranks, "run", step, self.steps, seconds=SECONDS)
        seconds = time.monotonic() - began
        self.done += self.steps
        answers = [worker.answer(number, SECONDS) for worker, number in asked]
        facts = {"kind": kind, "seconds_a_step": seconds / self.steps, "beside": time.monotonic() - began}
        if kind == "copy":
            for worker in self.ranks:
                worker.answer(worker.call_now("commit", self.copies.key(1, step)))
            facts["bytes_a_rank"] = answers[0].bytes
            facts["sent_gb_per_s"] = min(answer.bytes / answer.transfer_seconds for answer in answers) / 1e9
        if kind == "checkpoint":
            facts["bytes_a_rank"] = sum(entry["bytes"] for entry in answers[0].entries)
            shutil.rmtree(self.folder)
        print(json.dumps(facts), flush=True)
        return facts


def cost(args: argparse.Namespace, overrides: list[str]) -> dict[str, Any]:
    """The first copy or checkpoint of every kind does not count, as it allocates memory."""
    config = load(ROOT / "deploy" / "jobs" / "llama-8b.yaml", [*COST, *overrides])
    kinds = ("nothing", *args.kinds)
    plan = replace(make_plan(config, config.cluster.device), replicate_every=args.steps)
    ranks, rows, began = [WorkerProcess() for _ in range(plan.mesh.size)], list[dict[str, Any]](), time.monotonic()
    try:
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            trial = Trial(ranks, plan, args.steps, Path(folder, "checkpoints"))
            for kind in kinds:
                trial.run(kind)
            while len(rows) < args.rounds * len(kinds) and time.monotonic() < began + args.seconds:
                rows += [trial.run(kind) for kind in kinds]
    finally:
        for worker in ranks:
            worker.stop()
    steps = {kind: [row["seconds_a_step"] for row in rows if row["kind"] == kind] for kind in kinds}
    plain = median(steps["nothing"])
    return {
        "parameters": num_parameters(config.model.spec),
        "steps_between": args.steps,
        "seconds_a_step": {kind: median(its) for kind, its in steps.items()},
        "spread_without": max(steps["nothing"]) / min(steps["nothing"]) - 1,
        "share_of_a_step": {kind: median(steps[kind]) / plain - 1 for kind in args.kinds},
        "stop_seconds": {kind: (median(steps[kind]) - plain) * args.steps for kind in args.kinds},
        "rows": rows,
    }


def kill(args: argparse.Namespace, overrides: list[str]) -> dict[str, Any]:
    """Kills one rank after the other, by default each once."""
    command = [sys.executable, "-P", "-m", "pentad.orchestrator.cli.cli", "train", args.job, *KILL]
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        run, rows = Path(folder, "kill"), list[dict[str, Any]]()
        printed = Path(folder, "printed")
        with printed.open("w") as out:
            driver = subprocess.Popen([*command, f"run.folder={folder}", *overrides], stdout=out, stderr=out)
        try:
            _wait(driver, printed, partial(_has_steps, run, args.steps))
            places = _places(run)
            for number in range(args.kills or len(places)):
                rank = len(places) - 1 - number % len(places)
                generation, steps = _metrics(run)[-1]["generation"], len(_metrics(run))
                if any("replicate_every" in word for word in overrides):
                    _wait(driver, printed, partial(_has_copies, run, generation))
                _wait(driver, printed, partial(_has_steps, run, steps + args.steps))
                if args.spare_ready:
                    _wait(driver, printed, partial(_has_spare, run))
                before = _before(_metrics(run), _events(run, "copies"), generation)
                at = time.time()
                known = len(read_lines(run / "journal.jsonl"))
                os.kill(_places(run)[rank], signal.SIGKILL)
                _wait(driver, printed, partial(_has_generation, run, generation + 1))
                rows.append({"rank": rank, **_recovery(run, generation, at, known), **before})
                print(json.dumps(rows[-1]), flush=True)
        finally:
            driver.send_signal(signal.SIGTERM)
            try:
                driver.wait(60)
            except subprocess.TimeoutExpired:
                driver.kill()
    plain = median(seconds for row in rows for seconds in row["seconds_of_steps"][2:])
    return {"next_step": [row["next_step"] for row in rows], "step_seconds": plain, "rows": rows}


def _places(run: Path) -> list[int]:
    """The PIDs of the ranks."""
    with connect(run) as client:
        return [rank["pid"] for rank in client.status(30)["ranks"]]


def _before(metrics: list[dict[str, Any]], copies: list[dict[str, Any]], generation: int) -> dict[str, Any]:
    """What a generation has done by the time one of its ranks is killed; read before, as a recovery drops the rows of
    steps that run again."""
    steps = [round(row["step_seconds"], 3) for row in metrics if row["generation"] == generation]
    made = [{fact: row[fact] for fact in COPY} for row in copies if row["generation"] == generation]
    return {"seconds_of_steps": steps, "copies": made}


def _recovery(run: Path, generation: int, at: float, known: int) -> dict[str, Any]:
    """What followed a kill at Unix time `at`, when the journal had `known` lines."""
    first = next(row for row in _metrics(run) if row["generation"] > generation)
    recovered = _events(run, "recovered")[-1]
    facts = {key: recovered[key] for key in ("how", "step", "steps_replayed", "seconds")}
    events = read_lines(run / "journal.jsonl")[known:]
    lost = [row for row in events if row["event"] == "lost"]
    facts |= {"lost": [row["rank"] for row in lost], "causes": [row["cause"] for row in events if "cause" in row]}
    return {"noticed": lost[0]["time"] - at, "next_step": first["time"] - at, **facts}


def _wait(driver: subprocess.Popen[bytes], printed: Path, holds: Callable[[], object]) -> None:
    until = time.monotonic() + SECONDS
    while not holds():
        if driver.poll() is not None or time.monotonic() > until:
            sys.exit(printed.read_text()[-5000:])
        time.sleep(0.02)


def _has_steps(run: Path, more_than: int) -> bool:
    return len(_metrics(run)) > more_than


def _has_generation(run: Path, generation: int) -> bool:
    return any(row["generation"] >= generation for row in _metrics(run)[-1:])


def _has_copies(run: Path, generation: int) -> bool:
    return any(row["generation"] == generation for row in _events(run, "copies"))


def _has_spare(run: Path) -> bool:
    return len(_events(run, "spare ready")) > len(_events(run, "spare taken"))


def _metrics(run: Path) -> list[dict[str, Any]]:
    return read_lines(run / "metrics.jsonl")


def _events(run: Path, kind: str) -> list[dict[str, Any]]:
    return [row for row in read_lines(run / "journal.jsonl") if row["event"] == kind]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["cost", "kill"])
    parser.add_argument("--steps", type=int, default=10, help="from one copy or checkpoint to the next; before a kill")
    parser.add_argument("--rounds", type=int, default=5, help="of all kinds")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS, help="what is made beside steps")
    parser.add_argument("--job", default=str(ROOT / "deploy" / "jobs" / "llama-1b.yaml"), help="whose ranks are killed")
    parser.add_argument("--kills", type=int, help="of ranks in turn; by default every rank is killed once")
    parser.add_argument("--spare-ready", action="store_true", help="kill no rank before a spare is ready")
    parser.add_argument("--seconds", type=float, default=200.0, help="after which no round begins")
    parser.add_argument("--folder", type=Path, help="for checkpoints and runs")
    parser.add_argument("--json", type=Path, help="JSON file of the results; other sections in it are left as they are")
    args, overrides = parser.parse_known_args()
    record(args.json, args.what, lambda: {"cost": cost, "kill": kill}[args.what](args, overrides))


if __name__ == "__main__":
    main()
