"""How long a program takes from its name to its proof, beside torch's construction and lowering of the same schedule.

    PYTHONPATH=.typings python -P tests/bench/compile_speed.py [--quick] [--out FILE.json]

One process, one thread, process time (CPU seconds: other work on the machine does not count); the least of `REPEATS`
runs. torch constructs its schedule object and lowers it to `pipeline_order_with_comms`, without a proof; what is timed
here orders, places transfers and slots, reduces, steps and proves.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import sys
import time
import tracemalloc
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from pentad.schedules.compiler import compile_program
from pentad.schedules.simulate.costs import Costs
from pentad.schedules.simulate.simulate import simulate
from pentad.schedules.spec.mesh import Mesh

REPEATS = 3
SCHEDULES = {"interleaved": "Interleaved1F1B", "zb-v": "ZBVZeroBubble"}


def seconds(action: Callable[[], Any], repeats: int = REPEATS) -> float:
    times = []
    for _ in range(repeats):
        started = time.process_time()
        action()
        times.append(time.process_time() - started)
    return min(times)


def torch_seconds(name: str, ranks: int, microbatches: int) -> float:
    from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

    def construct() -> None:
        get_schedule_ops(name, ranks, microbatches, num_stages_per_rank=2, with_comms=True)

    return seconds(construct, 1)


def against_torch(sizes: list[tuple[int, int]]) -> list[dict[str, Any]]:
    rows = []
    for name, other in SCHEDULES.items():
        for ranks, microbatches in sizes:
            ours = seconds(partial(compile_program, name, ranks, microbatches))
            theirs = torch_seconds(other, ranks, microbatches)
            size = {"schedule": name, "ranks": ranks, "microbatches": microbatches, "chunks": 2}
            rows.append(size | {"seconds": ours, "torch_seconds": theirs, "times_as_quick": theirs / ours})
            print(json.dumps(rows[-1]), flush=True)
    return rows


def growth(largest: int) -> list[dict[str, Any]]:
    """Seconds an instruction at m = 4p, and the exponent with which seconds grow in instructions."""
    rows = []
    for name in SCHEDULES:
        points = []
        ranks = 8
        while ranks <= largest:
            program = compile_program(name, ranks, 4 * ranks)
            took = seconds(partial(compile_program, name, ranks, 4 * ranks))
            points.append((program.columns.rows, took, ranks))
            ranks *= 2
        (first, one, _), (last, two, _) = points[0], points[-1]
        each = [{"ranks": p, "instructions": n, "seconds": t, "microseconds_each": 1e6 * t / n} for n, t, p in points]
        exponent = math.log(two / one) / math.log(last / first)
        rows.append({"schedule": name, "exponent": exponent, "points": each})
        print(json.dumps(rows[-1]), flush=True)
    return rows


def mesh(size: Mesh) -> dict[str, Any]:
    """The streams of all ranks: those that differ in dp, cp, tp or ep only share one."""
    tracemalloc.start()
    started = time.process_time()
    program = compile_program("interleaved", size.pp, 4 * size.pp, replicas=size.dp)
    streams = [program.streams[size.coordinates(rank).pp] for rank in range(size.size)]
    took, peak = time.process_time() - started, tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    found = {"mesh": str(size), "ranks": size.size, "distinct": len(set(map(id, streams)))}
    return found | {"seconds": took, "peak_mib": peak / 2**20}


def replanning(ranks: int, microbatches: int) -> dict[str, float]:
    """Seconds to a proven program for a changed table of costs."""
    found = {}
    for name in ("1f1b", "interleaved", "zb-h2", "zb-v", "dualpipe", "zb-2p", "v-half"):
        stages = compile_program(name, ranks, microbatches).stages
        each = tuple(1 + (stage % 3) / 10 for stage in range(stages))
        changed = Costs(each, each, each, transfer=0.1)
        found[name] = seconds(partial(compile_program, name, ranks, microbatches, costs=changed))
    return found


def simulation(ranks: int, microbatches: int) -> dict[str, float]:
    program = compile_program("zb-v", ranks, microbatches)
    costs = Costs.uniform(program.stages, chunks=2, transfer=0.1)
    return {"instructions": program.columns.rows, "seconds": seconds(partial(simulate, program, costs), 2)}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--quick", action="store_true", help="sizes that take seconds")
    options.add_argument("--out", type=Path)
    asked = options.parse_args()
    sizes = [(8, 32), (16, 64)] if asked.quick else [(8, 32), (16, 64), (32, 128), (64, 256)]
    load = os.getloadavg()[0]
    found = {
        "command": f"PYTHONPATH=.typings python -P {' '.join(sys.argv)}",
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M"),
        "machine": f"{os.cpu_count()} cores, {sys.platform}, Python {sys.version.split()[0]}",
        "compile": against_torch(sizes),
        "growth": growth(16 if asked.quick else 128),
        "mesh": mesh(Mesh(dp=64, pp=16, cp=2, tp=8)),
        "replanning_p16_m64": replanning(16, 64),
        "simulation": simulation(16, 64) if asked.quick else simulation(128, 600),
        "load_before_and_after": [round(load, 1), round(os.getloadavg()[0], 1)],
        "peak_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }
    print(json.dumps({k: v for k, v in found.items() if k not in ("compile", "growth")}, indent=1))
    if asked.out:
        asked.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
