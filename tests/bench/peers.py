"""Tokens per second and GPU of pentad and then of torchtitan 0.2.2 on the GPUs of one host.

PYTHONPATH=.typings:tests/support:tests/bench python -P tests/bench/peers.py --out OUT --titan FOLDER 8b-dp4 8b-tp4

With --again pentad runs once more after torchtitan. The cases are in peers.yaml. torchtitan and what it needs are taken
from FOLDER, where they disturb nothing else (`pip install --no-deps --target FOLDER ...`). pentad has float32 master
weights in every case, torchtitan where its flags do not say bfloat16. Cases of long sequences need --data, since the
built-in corpus has 112,278 tokens: what `pentad data build /usr/lib/python3.12/*.py FOLDER --vocab 4096` writes, say.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import yaml
from meshes import WARMUP, measure, train
from ranks import Ranks
from record import stamp, write

HERE = Path(__file__).parent
CASES: dict[str, dict[str, Any]] = yaml.safe_load((HERE / "peers.yaml").read_text())
STEPS = 24
SPEED = "tokens_per_second_per_gpu"
COMPILING = 3  # first steps of torchtitan, which are not timed
LOGGED = re.compile(r"step:\s+(\d+)\s.*?memory:\s+([\d.]+)GiB.*?tps:\s+([\d,]+)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="+", choices=list(CASES))
    parser.add_argument("--out", type=Path, help="JSON file of the results")
    parser.add_argument("--titan", type=Path, help="folder of torchtitan; without it pentad runs alone")
    parser.add_argument("--data", type=Path, help="corpus; builtin:pydoc by default")
    parser.add_argument("--limit", type=float, default=120.0, help="time limit of a run, in seconds")
    parser.add_argument("--again", action="store_true", help="run pentad before torchtitan and after it")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that started processes are ended, too
    rows: list[dict[str, Any]] = [{"case": name, **CASES[name]} for name in args.cases]
    run_pentad("pentad", rows, args)
    for row in rows:
        flags = row["titan"] if args.titan else []
        row["torchtitan"] = [torchtitan(args.titan, row, each, args.limit) for each in flags]
        print(report(row), flush=True)
        write(args.out, {**stamp(), "rows": rows})
    if args.again:
        run_pentad("again", rows, args)
        print("\n".join(map(report, rows)), flush=True)


def run_pentad(key: str, rows: list[dict[str, Any]], args: argparse.Namespace) -> None:
    """Adds the runs of every case to its row, in processes that end with them."""
    ranks = Ranks(args.limit, train)
    for row in rows:
        row[key] = pentad(ranks, row, [f"data.path={args.data}"] if args.data else [])
        write(args.out, {**stamp(), "rows": rows})
    ranks.stop()


def torchtitan(folder: Path, case: dict[str, Any], flags: str, limit: float) -> dict[str, Any]:
    """The median of the steps after compilation, or the last log lines if there are none."""
    count = case.get("titan_steps", case.get("steps", STEPS))
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(case["gpus"])),
        HERE / "titan.py",
        *("--model.name", case.get("model", "llama3"), "--training.steps", str(count)),
        *("--metrics.log_freq", "1", "--metrics.disable_color_printing", "--lr_scheduler.warmup_steps", "2"),
        *(() if "activation_checkpoint" in flags else ("--activation_checkpoint.mode", "none")),
        *flags.split(),
    ]
    with tempfile.TemporaryFile("a+") as log:  # both processes read and write it
        environment = os.environ | {"PYTHONPATH": str(folder)}
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
        until = time.monotonic() + limit
        try:
            while process.poll() is None and time.monotonic() < until:
                time.sleep(0.5)
                if any(step == count for step, *_ in logged(log)):  # it does not always end after its last step
                    break
        finally:
            with suppress(ProcessLookupError):  # it may have ended
                os.killpg(process.pid, signal.SIGKILL)
        steps = logged(log)
        log.seek(0)
        text = log.read()
    compiling = min(COMPILING, count - 2)
    timed = [tps for step, _, tps in steps if step > compiling]
    if not timed:
        return {"flags": flags, "error": text[-1000:]}
    memory = max(gib for _, gib, _ in steps)
    return {
        **{"flags": flags, SPEED: statistics.median(timed)},
        **{"steps": max(step for step, *_ in steps) - compiling, "reserved_gib": memory},
    }


def logged(log: IO[str]) -> list[tuple[int, float, float]]:
    """Number, reserved GiB and tokens per second of each logged step; every rank of torchtitan logs."""
    log.seek(0)
    return [(int(step), float(gib), float(tps.replace(",", ""))) for step, gib, tps in LOGGED.findall(log.read())]


def pentad(ranks: Ranks, case: dict[str, Any], data: list[str]) -> list[dict[str, Any]]:
    """One row per run."""
    rows, steps = list[dict[str, Any]](), case.get("steps", STEPS)
    for overrides in case["runs"]:
        words = [f"run.steps={steps}", "optimizer.warmup_steps=4", *data, *case["all"].split(), *overrides.split()]
        rows.append(measure(ranks, f"deploy/jobs/{case['job']}.yaml", words, "cuda", min(WARMUP, steps - 2)))
        print(json.dumps({k: v for k, v in rows[-1].items() if k not in ("losses", "norms")}), flush=True)
    return rows


def report(row: dict[str, Any]) -> str:
    """One line per run: speed, ratio to torchtitan's best, share of the GPU's peak, memory, last loss."""
    peers = [run[SPEED] for run in row["torchtitan"] if "error" not in run]
    lines = [f"{row['case']}: torchtitan {', '.join(f'{speed:,.0f}' for speed in peers) or 'no figure'} tokens/s/GPU"]
    for overrides, run, *again in zip(
        row["runs"], *(row[key] for key in ("pentad", "again") if key in row), strict=True
    ):
        if "error" in run:
            lines.append(f"  {overrides}: {run['error'][-300:]}")
            continue
        speed, after = run[SPEED], "".join(f", then {each.get(SPEED, 0):,.0f}" for each in again)
        ratio = f"{speed / max(peers):.3f} of it, " if peers else ""
        share = f"{run['mfu']:.1%} MFU, {run['peak_gib']} GiB"
        lines.append(f"  {overrides}: {speed:,.0f}{after}, {ratio}{share}, last loss {run['last_loss']}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
