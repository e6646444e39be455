"""Times compiling and proving a program, compared with torch constructing and lowering the same schedule.

PYTHONPATH=.typings:tests/support python tests/bench/compile_speed.py [--quick] [--out FILE.json]

Times are CPU seconds of one process with one thread, the minimum of `REPEATS` runs, with units the median of five.
torch constructs its schedule and lowers it to `pipeline_order_with_comms`, without a proof; pentad generates the order,
runs all passes and proves it.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import statistics
import time
import tracemalloc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from record import with_load, write

from pentad.schedules.compiler import compile_program
from pentad.schedules.simulate.costs import Costs
from pentad.schedules.simulate.simulate import simulate
from pentad.schedules.spec.mesh import Mesh
from pentad.schedules.spec.schedule_spec import MemoryOptions

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


def compare_with_torch(sizes: list[tuple[int, int]]) -> list[dict[str, Any]]:
    rows = []
    for name, torch_name in SCHEDULES.items():
        for ranks, microbatches in sizes:
            ours = seconds(partial(compile_program, name, ranks, microbatches))
            theirs = torch_seconds(torch_name, ranks, microbatches)
            size = {"schedule": name, "ranks": ranks, "microbatches": microbatches, "chunks": 2}
            rows.append(size | {"seconds": ours, "torch_seconds": theirs, "times_as_quick": theirs / ours})
            print(json.dumps(rows[-1]), flush=True)
    return rows


def growth(largest: int) -> list[dict[str, Any]]:
    """Seconds per instruction at m = 4p, and the exponent of their growth: seconds ~ instructions^exponent."""
    rows = []
    for name in SCHEDULES:
        points: list[dict[str, float]] = []
        ranks = 8
        while ranks <= largest:
            program = compile_program(name, ranks, 4 * ranks)
            taken, count = seconds(partial(compile_program, name, ranks, 4 * ranks)), program.columns.rows
            point = {"ranks": ranks, "instructions": count, "seconds": taken}
            points.append(point | {"microseconds_each": 1e6 * taken / count})
            ranks *= 2
        first, last = points[0], points[-1]
        times_slower, times_larger = (last[key] / first[key] for key in ("seconds", "instructions"))
        exponent = math.log(times_slower) / math.log(times_larger)
        rows.append({"schedule": name, "exponent": exponent, "points": points})
        print(json.dumps(rows[-1]), flush=True)
    return rows


def mesh_streams(mesh: Mesh) -> dict[str, Any]:
    """Time and memory for the streams of all ranks. Ranks that differ only in dp, cp, tp or ep share a stream."""
    tracemalloc.start()
    started = time.process_time()
    program = compile_program("interleaved", mesh.pp, 4 * mesh.pp, replicas=mesh.dp)
    streams = [program.streams[mesh.coordinates(rank).pp] for rank in range(mesh.size)]
    taken, peak = time.process_time() - started, tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    facts = {"mesh": str(mesh), "ranks": mesh.size, "distinct": len(set(map(id, streams)))}
    return facts | {"seconds": taken, "peak_mib": peak / 2**20}


def replanning(ranks: int, microbatches: int) -> dict[str, float]:
    """Seconds to compile and prove each schedule again after the costs have changed."""
    results = {}
    for name in ("1f1b", "interleaved", "zb-h2", "zb-v", "dualpipe", "zb-2p", "v-half"):
        stages = compile_program(name, ranks, microbatches).stages
        each = tuple(1 + (stage % 3) / 10 for stage in range(stages))
        changed = Costs(each, each, each, transfer=0.1)
        results[name] = seconds(partial(compile_program, name, ranks, microbatches, costs=changed))
    return results


def with_units(ranks: int, microbatches: int, units: int) -> dict[str, float]:
    """Seconds to compile and prove 1f1b with stages of this many units, by ZeRO stage."""
    results = {}
    sizes = tuple((1000 + unit % units,) for unit in range(units * ranks))
    for zero in range(4):
        options = MemoryOptions(
            zero=zero,
            units=(units,) * ranks,
            max_gathered=2 if zero == 3 else None,
            reduce=None if zero > 1 else "step",
            sizes=sizes,
        )
        action = partial(compile_program, "1f1b", ranks, microbatches, replicas=2, memory_options=options)
        results[f"zero{zero}"] = statistics.median(seconds(action, 1) for _ in range(5))
    return results


def simulation(ranks: int, microbatches: int) -> dict[str, float]:
    program = compile_program("zb-v", ranks, microbatches)
    costs = Costs.uniform(program.stages, chunks=2, transfer=0.1)
    return {"instructions": program.columns.rows, "seconds": seconds(partial(simulate, program, costs), 2)}


def measure(quick: bool) -> dict[str, Any]:
    sizes = [(8, 32), (16, 64)] if quick else [(8, 32), (16, 64), (32, 128), (64, 256)]
    return {
        "compile": compare_with_torch(sizes),
        "growth": growth(16 if quick else 128),
        "mesh": mesh_streams(Mesh(dp=64, pp=16, cp=2, tp=8)),
        "replanning_p16_m64": replanning(16, 64),
        "units_8": with_units(16, 64, 8) if quick else with_units(64, 256, 8),
        "simulation": simulation(16, 64) if quick else simulation(128, 600),
        "peak_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="only sizes that take seconds")
    parser.add_argument("--out", type=Path, help="JSON file of the results")
    args = parser.parse_args()
    results = with_load(partial(measure, args.quick))
    print(json.dumps({k: v for k, v in results.items() if k not in ("compile", "growth")}, indent=1))
    write(args.out, results)


if __name__ == "__main__":
    main()
