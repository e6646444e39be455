"""Trains the 1B model on real text in bfloat16 and in 8 bits, the same batches in each run, and compares the losses.

apt-get download anarchism dict-gcide linux-doc-6.1 python3.11-doc perl-doc linux-source-6.1
for package in *.deb; do dpkg-deb -x "$package" debian; done
python tests/bench/real_texts.py debian texts --only essays dictionary code manuals kernel --megabytes 250
pentad data build 'texts/*.jsonl' corpus
PYTHONPATH=.typings:tests/support python tests/bench/fp8_loss.py corpus --json FILE --svg FILE

No sequence is repeated: 500 steps of 12,288 tokens read less than half of the corpus. RECIPE/N cuts a step into N
microbatches: the same sums, rounded otherwise, so `compute/2` shows how far two runs in bfloat16 are apart. The exit
status is 0 if every run ends within 0.3 % of bfloat16 and, after WARMUP steps, no mean of WINDOW steps is more than 1 %
from its.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from meshes import summarize, train
from ranks import Ranks
from record import stamp, write

from pentad.orchestrator.config.config import load
from pentad.orchestrator.planning.planning import make_plan
from pentad.schedules.draw.losses import LossCurve, Window, svg_losses

CONFIG = Path("deploy/jobs/llama-1b.yaml")
BASELINE = "compute"
RECIPES = (BASELINE, "fp8-tensor", "fp8-row", "fp8-block")
WARMUP, WINDOW = 100, 20  # steps
END, APART = 0.003, 0.01  # relative to the loss in bfloat16


def overrides(args: argparse.Namespace, run: str) -> list[str]:
    recipe, _, microbatches = run.partition("/")
    return [
        f"data.path={args.corpus}",
        f"precision.matmul={recipe}",
        f"run.steps={args.steps}",
        *("model.vocab=32768", "mesh.pp=1", "schedule.name=1f1b"),
        f"schedule.microbatches={microbatches or 1}",
        *("batch.global_batch_size=6", "batch.sequence_length=2048", "optimizer.warmup_steps=50"),
        *args.overrides,
    ]


def windows(losses: list[float]) -> list[float]:
    """Means over WINDOW steps."""
    return [fmean(losses[first : first + WINDOW]) for first in range(0, len(losses), WINDOW)]


def compared(found: list[float], want: list[float]) -> dict[str, float]:
    """Deviations from the losses in bfloat16, in means of windows: at the end, and the largest after WARMUP."""
    apart = [a / b - 1 for a, b in zip(windows(found), windows(want), strict=True)]
    return {"end": apart[-1], "most": max(apart[min(WARMUP // WINDOW, len(apart) - 1) :], key=abs)}


def curve(name: str, losses: list[float], tokens: int) -> LossCurve:
    means = enumerate(windows(losses))
    return LossCurve(name, tuple(Window(WINDOW * n, WINDOW * (n + 1), mean, WINDOW * tokens) for n, mean in means))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", type=Path, help="folder that `pentad data build` wrote")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--recipes", nargs="+", default=RECIPES[1:], metavar="RECIPE[/N]")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--svg", type=Path)
    parser.add_argument("overrides", nargs="*", help="of the configuration, key=value")
    args = parser.parse_intermixed_args()
    ranks, rows, curves = Ranks(600.0, train), list[dict[str, Any]](), list[LossCurve]()
    for recipe in (BASELINE, *args.recipes):
        began, plan = time.monotonic(), make_plan(load(CONFIG, overrides(args, recipe)), args.device)
        row = {"recipe": recipe, **summarize(plan, ranks.run(plan)), "wall_seconds": time.monotonic() - began}
        row |= compared(row["losses"], rows[0]["losses"] if rows else row["losses"])
        rows.append(row)
        curves.append(curve(recipe if rows[1:] else plan.dtype, row["losses"], plan.batch.tokens))
        print(
            f"{recipe:<12}{row['tokens_per_second_per_gpu']:>10,.0f} tokens/s{row['last_loss']:>9.4f}"
            f"{row['end']:>+9.2%} at the end{row['most']:>+9.2%} at most{row['wall_seconds']:>7.0f} s",
            flush=True,
        )
        machine = f"{torch.cuda.get_device_name()}, torch {torch.__version__}" if args.device == "cuda" else ""
        write(args.json, {**stamp(machine), "runs": rows})
        if args.svg is not None:
            title = f"1B on real text: {plan.batch.tokens:,} tokens a step"
            args.svg.write_text(svg_losses(tuple(curves), title=title, of_one_run=False))
    ranks.stop()
    return int(any(abs(row["end"]) > END or abs(row["most"]) > APART for row in rows))


if __name__ == "__main__":
    sys.exit(main())
