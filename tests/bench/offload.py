"""Times copies to and from host memory on one GPU, alone and beside a product, and steps whose activations they move.

PYTHONPATH=.typings:tests/support python tests/bench/offload.py --budget 70 --json OUT

The model has the dimensions of Llama 3 8B. Every row of a training step is a process of its own: its peak memory is
compared with the plan's. Rows that are planned to need more than `--budget` GiB, or would begin after `--seconds`, are
left out. At the end a table has planned and measured figures of all rows.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import torch
from record import write

GIB = 2**30
PRODUCTS, ROUNDS = 20, 9
MODEL = "family=llama hidden=4096 heads=32 kv_heads=8 ffn=14336 vocab=128256 rope_theta=500000.0 norm_eps=1e-5"
LLAMA = [f"model.{word}" for word in MODEL.split()]
COMMON = [
    *("run.name=offload", "mesh.dp=1", "mesh.pp=1", "schedule.name=1f1b", "schedule.microbatches=1"),
    *("batch.global_batch_size=1", "precision.deterministic=false", "cluster.device=cuda"),
    *("data.holdout=0", "eval.every=0"),
]
ON_HOST = "optimizer=host offload_fraction=auto host_gib=112"
# Layers, tokens of a sequence, and options (of memory, unless they name a section). Without options, 8 layers do not
# fit at 131,072 tokens; all 32, with state in bfloat16, fit up to 262,144.
STEPS: dict[str, list[tuple[int, int, str]]] = {
    "alpha": [
        (8, 131072, "recompute=attention"),
        (8, 131072, "offload_fraction=0.8"),
        (8, 131072, "offload_fraction=0.6"),
        (8, 131072, "recompute=attention offload_fraction=1.0"),
        (8, 65536, ""),
        (8, 65536, "offload_fraction=0.6"),
        (8, 65536, "offload_fraction=1.0"),
    ],
    # Of what attention recomputes, some rows are saved on the host or on the device. Four layers fit into 70 GiB.
    "rows": [
        (4, length, options)
        for length in (32768, 65536)
        for options in (
            "",
            "offload_fraction=1.0",
            *(f"recompute=attention {more}" for more in ("", "recompute_fraction=0.5")),
            *(
                f"recompute=attention offload_fraction=1.0 recompute_fraction={share}"
                for share in (1.0, 0.75, 0.5, 0.25)
            ),
        )
    ],
    "host": [(8, 65536, "optimizer=host"), (32, 131072, f"recompute=attention {ON_HOST}")],
    "longest": [(32, 262144, f"recompute=full {ON_HOST} precision.optimizer_state=bfloat16")],
}
FEWER = {131072: 2, 262144: 1}  # numbers of steps with all layers, by tokens


def copies(size: int) -> dict[str, float]:
    """GB/s of copies of `size` bytes in each direction, alone and both at once, and how much they slow a product."""
    hosts = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    devices = [torch.empty(size, dtype=torch.uint8, device="cuda") for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in range(2)]
    x = torch.randn(8192, 4096, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(4096, 28672, device="cuda", dtype=torch.bfloat16)

    def start(*ways: str) -> list[tuple[torch.cuda.Event, torch.cuda.Event]]:
        found = []
        for way, stream, host, device in zip(("out", "in"), streams, hosts, devices, strict=True):
            if way in ways:
                events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream):
                    events[0].record()
                    (host.copy_(device, non_blocking=True) if way == "out" else device.copy_(host, non_blocking=True))
                    events[1].record()
                found.append(events)
        return found

    def rate(*ways: str) -> list[float]:
        torch.cuda.synchronize()
        events = start(*ways)
        torch.cuda.synchronize()
        return [size / begin.elapsed_time(end) / 1e6 for begin, end in events]

    def product(*ways: str) -> float:
        """Median milliseconds of a product. The copies outlast all products."""
        torch.cuda.synchronize()
        for _ in range(PRODUCTS):  # an idle GPU would begin at a higher clock
            torch.mm(x, w)
        start(*ways)
        events = [torch.cuda.Event(enable_timing=True) for _ in range(PRODUCTS + 1)]
        events[0].record()
        for event in events[1:]:
            torch.mm(x, w)
            event.record()
        torch.cuda.synchronize()
        return median(a.elapsed_time(b) for a, b in pairwise(events))

    cases = (), ("out",), ("in",), ("out", "in")
    for ways in cases:
        product(*ways)
    # Interleaved, since clocks drift.
    times: dict[tuple[str, ...], list[float]] = {ways: [] for ways in cases}
    for _ in range(ROUNDS):
        for ways in cases:
            times[ways].append(product(*ways))
    alone = median(times[()])
    both = rate("out", "in")
    return {
        "out": rate("out")[0],
        "in": rate("in")[0],
        "out_beside_in": both[0],
        "in_beside_out": both[1],
        "product_ms": alone,
        **{f"product_slower_by_{'_and_'.join(ways)}": median(times[ways]) / alone - 1 for ways in cases[1:]},
        "product_alone_spread": max(times[()]) / min(times[()]) - 1,
    }


def step(words: Sequence[str], steps: int, budget: float) -> dict[str, Any]:
    """Seconds of each step and peak memory of a rank in this process, with these overrides; only planned figures if
    more than `budget` GiB are planned."""
    from pentad.orchestrator.config.config import load
    from pentad.orchestrator.planning.estimate import memory as planned_memory
    from pentad.orchestrator.planning.estimate import simulated_seconds
    from pentad.orchestrator.planning.planning import make_plan
    from pentad.workers.runtime.runner import Runner

    plan = make_plan(load(None, [*COMMON, f"run.steps={steps}", f"data.path={corpus()}", *words]), "cuda")
    planned = planned_memory(plan, 0)
    on_host = planned["host"] + planned["host_optimizer"] + planned["snapshot"]
    facts = {
        "offloaded": max(plan.offload, default=0.0),
        "recomputing_units": sum(mode != "none" for mode in plan.recompute),
        "recomputed_rows": plan.recompute_fraction if plan.recompute else 0.0,
        "planned_seconds": simulated_seconds(plan),
        "planned_gib": planned["total"] / GIB,
        "planned_host_gib": on_host / GIB,
    }
    if facts["planned_gib"] > budget:
        return {**facts, "left_out": f"more than {budget:g} GiB"}
    with tempfile.TemporaryDirectory() as folder:
        runner = Runner(plan, 0, Path(folder, "progress"))
        runner.connect(runner.serve("127.0.0.1", 30), 30)
        runner.restore(None)
        torch.cuda.reset_peak_memory_stats()
        results = runner.run(0, 1)
        segments = torch.cuda.memory_stats()["num_device_alloc"]
        results += runner.run(1, steps - 1)
        stats = torch.cuda.memory_stats()
        runner.close()
    starts = [min(span.start for span in result.spans) for result in results]
    ends = [max(span.end for span in result.spans) for result in results]
    seconds = [end - start for start, end in zip(starts, ends, strict=True)]
    busy = {"compute": 0.0, "offload": 0.0, "reload": 0.0}
    for span in results[-1].spans:
        if span.lane in busy:
            busy[span.lane] += span.end - span.start
    peak = torch.cuda.max_memory_allocated()
    return {
        **facts,
        "step_seconds": seconds,
        "seconds": min(seconds[1:] or seconds),
        "tokens_per_second": plan.batch.tokens / min(seconds[1:] or seconds),
        "lane_seconds": busy,
        "losses": [sum(result.losses.values()) / plan.batch.tokens for result in results],
        "peak_gib": peak / GIB,
        "planned_over_measured": planned["total"] / peak,
        "device_allocations_after_the_first_step": stats["num_device_alloc"] - segments,
        "allocation_retries": stats["num_alloc_retries"],
    }


def corpus() -> Path:
    """Random words, longer than any sequence here."""
    from pentad.workers.preprocess.build import BuildRequest, build_corpus

    folder = Path(tempfile.gettempdir(), "pentad-bench-words")
    if not (folder / "out").exists():
        rng = Random(0)
        syllables = [a + b for a in "bdfgklmnprstvz" for b in "aeiou"]
        names = ["".join(rng.choices(syllables, k=rng.randint(1, 4))) for _ in range(5000)]
        folder.mkdir(exist_ok=True)
        text = folder / "words.txt"
        text.write_text(" ".join(rng.choices(names, k=600_000)))
        build_corpus(BuildRequest((str(text),), folder / "out", vocab=4096, workers=1), print, lambda progress: None)
    return folder / "out"


def _full_key(word: str) -> str:
    return word if "." in word.partition("=")[0] else f"memory.{word}"


def in_process(row: str, steps: int, budget: float) -> dict[str, Any]:
    """Runs a row in a process of its own, which gives back all memory."""
    command = [sys.executable, __file__, "--steps", str(steps), "--budget", str(budget), "--row", row]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else {"error": done.stderr[-2000:]}


def table(rows: Sequence[dict[str, Any]], names: Sequence[str]) -> str:
    """Planned and measured figures of rows, told apart by the columns `names`; rows that were left out have no measured
    ones."""
    figures = "planned_gib", "peak_gib", "planned_host_gib", "planned_seconds", "seconds"
    lines = [[*names, "planned GiB", "GiB", "host GiB", "planned s", "s"]]
    for row in rows:
        if "planned_gib" in row:
            found = (f"{row[key]:.3f}" if key in row else "-" for key in figures)
            lines.append([*(str(row[name]) for name in names), *found])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = ["copies", *STEPS]
    parser.add_argument("--only", default=",".join(parts), help="some of the parts")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--budget", type=float, default=math.inf, help="GiB of the GPU")
    parser.add_argument("--seconds", type=float, default=330.0)
    parser.add_argument("--row", help="LAYERS,TOKENS,OPTIONS: runs this row in this process")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.row == "copies":
        print(json.dumps({"device": torch.cuda.get_device_name(), "copies": copies(4 * GIB)}))
        return
    if args.row:
        layers, length, options = args.row.split(",")
        sizes = [f"model.layers={layers}", f"batch.sequence_length={length}"]
        print(json.dumps(step([*LLAMA, *sizes, *map(_full_key, options.split())], args.steps, args.budget)))
        return
    began, rows = time.monotonic(), list[dict[str, Any]]()

    def add(row: dict[str, Any]) -> None:
        rows.append(row)
        print(json.dumps(row), flush=True)
        write(args.json, rows)

    chosen = args.only.split(",")
    if unknown := set(chosen) - set(parts):
        parser.error(f"--only has {', '.join(unknown)}: expected {', '.join(parts)}")
    if "copies" in chosen:
        add(in_process("copies", 1, args.budget))
    for part, cases in STEPS.items():
        for layers, length, options in cases if part in chosen else ():
            if time.monotonic() - began > args.seconds:
                add({"part": part, "layers": layers, "length": length, "options": options, "left_out": True})
                continue
            steps = FEWER.get(length, args.steps) if layers == 32 else args.steps
            found = in_process(f"{layers},{length},{options}", steps, args.budget)
            add({"part": part, "layers": layers, "length": length, "options": options, **found})
    print(table(rows, ("layers", "length", "options")))


if __name__ == "__main__":
    main()
