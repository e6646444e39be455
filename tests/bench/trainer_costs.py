"""Measures what a mixture of corpora, loggers and validation cost a training step.

PYTHONPATH=.typings:tests/bench python tests/bench/trainer_costs.py deploy/jobs/llama-1b.yaml --json OUT mesh.pp=1

Trains in turn without and with them, and compares the medians of the step times, of which the first 10 are left out.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from record import record

WARM_UP = 10  # steps: kernels are compiled and clocks rise
SHARES = {"a": ("[a-d]*.py", 5), "b": ("[e-p]*.py", 3), "c": ("[q-z]*.py", 2)}


def pentad(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pentad.orchestrator.cli.cli", *arguments], check=True, stdout=sys.stderr)


def build_corpora(folder: Path) -> dict[str, Path]:
    """Three parts of the standard library's sources, with one tokenizer."""
    library, corpora = sysconfig.get_path("stdlib"), {name: folder / name for name in SHARES}
    for name, (pattern, _) in SHARES.items():
        tokenizer = ["--vocab", "1024"] if name == "a" else ["--tokenizer", str(corpora["a"])]
        pentad("data", "build", f"{library}/{pattern}", str(corpora[name]), *tokenizer)
    return corpora


def kinds_of_runs(corpora: dict[str, Path], steps: int) -> dict[str, list[str]]:
    """Overrides of each kind of run."""
    sources = [{"path": str(corpora[name]), "weight": weight, "name": name} for name, (_, weight) in SHARES.items()]
    mixed = ["data.path=null", f"data.sources={json.dumps(sources)}", "loggers.use=[csv,tensorboard]"]
    return {
        "plain": [f"data.path={corpora['a']}", "data.holdout=0"],
        "mixture_and_loggers": [*mixed, "data.holdout=0"],
        "validation_too": [*mixed, "data.holdout=0.1", f"eval.every={steps // 2}", "eval.at_start=true"],
    }


def train(job: str, steps: int, overrides: list[str], folder: Path) -> list[dict[str, Any]]:
    """Rows of metrics.jsonl of a run, which is deleted afterwards."""
    common = [f"run.steps={steps}", f"run.folder={folder}", "run.name=trial"]
    pentad("train", job, *common, "checkpoint.every=0", "checkpoint.at_end=false", *overrides)
    rows = [json.loads(line) for line in (folder / "trial" / "metrics.jsonl").read_text("utf-8").splitlines()]
    shutil.rmtree(folder)
    return rows


def step_seconds(rows: list[dict[str, Any]]) -> list[float]:
    return [row["step_seconds"] for row in rows if "step_seconds" in row][WARM_UP:]


def data_wait_share(rows: list[dict[str, Any]]) -> float:
    """Fraction of the steps' time in which the slowest rank waited for data."""
    waited = [row["data_wait_seconds"] for row in rows if "step_seconds" in row][WARM_UP:]
    return sum(waited) / sum(step_seconds(rows))


def measure(job: str, steps: int, repeats: int, overrides: list[str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        kinds = kinds_of_runs(build_corpora(Path(folder)), steps)
        found: dict[str, list[list[dict[str, Any]]]] = {kind: [] for kind in kinds}
        for repeat, (kind, more) in product(range(repeats), kinds.items()):
            found[kind].append(train(job, steps, [*overrides, *more], Path(folder, f"{kind}{repeat}")))
    medians = {kind: [median(step_seconds(rows)) for rows in runs] for kind, runs in found.items()}
    least = {kind: min(seconds) for kind, seconds in medians.items()}
    return {
        "step_seconds": medians,
        "over_plain": {kind: seconds / least["plain"] - 1 for kind, seconds in least.items()},
        "data_wait_share": data_wait_share(found["mixture_and_loggers"][-1]),
        "last_row": found["validation_too"][-1][-1],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("job")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--repeats", type=int, default=2, help="runs of each kind")
    parser.add_argument("--json", type=Path)
    args, overrides = parser.parse_known_args()
    record(args.json, "trainer_costs", lambda: measure(args.job, args.steps, args.repeats, overrides))


if __name__ == "__main__":
    main()
