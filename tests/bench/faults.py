"""Takes ranks from runs of `pentad train` on CPUs: how soon it is noticed, when training goes on, what is left.

PYTHONPATH=.typings:tests/support python tests/bench/faults.py --kills 50 --stops 20 --nodes 6 --soak 5000

Kills and stops are of one run after the other: a rank picked at random gets SIGKILL or SIGSTOP, one second at most
after the run made some steps since the last time. One rank is spared: what grows in it grows with every recovery.
A node is lost by SIGKILL of its raylet, on a cluster of a head and three nodes. All times are of the journal.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from growth import Growth, left, look
from live import SPARE, Ended, LiveRun
from record import record

STEPS_BETWEEN = 3
HANG_SECONDS = 3.0
SAMPLE_STEPS = 250
LIMIT_SECONDS = 90.0
ELASTIC = ("elastic.max_failures=1000000", "run.steps=1000000", f"elastic.hang_seconds={HANG_SECONDS:g}")
TINY = ("mesh.dp=1", "mesh.pp=2", "batch.global_batch_size=4", "batch.sequence_length=32")  # steps of some 10 ms


def strike(run: LiveRun, chance: random.Random, hit: Callable[[], None]) -> dict[str, Any]:
    """Hits a run and waits until it goes on; the moments in seconds."""
    run.wait_steps(STEPS_BETWEEN)
    time.sleep(chance.random())
    at, struck = run.position(), time.time()
    hit()
    lost = run.event("lost", LIMIT_SECONDS, struck)
    recovered = run.event("recovered", LIMIT_SECONDS, struck)
    return {
        "step": at,
        "rank": lost["rank"],
        "fault": lost["fault"],
        "detector": lost["detector"],
        "cause": lost["cause"],
        "noticed": lost["time"] - struck,
        "recovered": recovered["time"] - lost["time"],
        "stepped": run.step_seen(recovered["generation"], LIMIT_SECONDS) - lost["time"],
        "how": recovered["how"],
        "phases": recovered["seconds"],
        "steps_replayed": recovered["steps_replayed"],
        "ranks_lost": run.count("lost", struck),
    }


def series(folder: Path, count: int, how: int, chance: random.Random) -> dict[str, Any]:
    """Strikes one run `count` times, and looks at what it holds after each."""
    rows: list[dict[str, Any]] = []
    failure = ""
    with LiveRun(folder, *ELASTIC, "cluster.address=local") as run:
        run.wait_steps(STEPS_BETWEEN)
        spared = run.rank_pids()[SPARE]
        growth = Growth({"driver": run.process.pid, "spared rank": spared})
        found = look(run.members())
        growth.sample(run.members())
        try:
            for number in range(count):
                victim = chance.choice([pid for pid in run.ranks() if pid != spared])
                rows.append({"struck_pid": victim, **strike(run, chance, partial(os.kill, victim, how))})
                rows[-1]["struck_is_gone"] = not psutil.pid_exists(victim)
                run.wait_steps(STEPS_BETWEEN)
                growth.sample(run.members())
                print(number, json.dumps(rows[-1]), flush=True)
        except Ended as error:
            failure = str(error)
        found |= look(run.members())
        members = run.members()
        status = run.stop()
        whole = run.is_whole()
    return {
        **told(rows, HANG_SECONDS if how == signal.SIGSTOP else 0.0),
        "failure": failure,
        "exit_status": status,
        "every_step_once": whole,
        "growth": growth.told(),
        "left_after_the_run": left(members, found),
        "rows": rows,
    }


def told(rows: Sequence[dict[str, Any]], deadline: float = 0.0) -> dict[str, Any]:
    if not rows:
        return {"count": 0}
    phases = sorted({phase for row in rows for phase in row["phases"]})
    return {
        "count": len(rows),
        "noticed_after_deadline": spread([row["noticed"] - deadline for row in rows]),
        "deadline_seconds": deadline,
        "recovered_after_noticed": spread([row["recovered"] for row in rows]),
        "first_step_after_noticed": spread([row["stepped"] for row in rows]),
        "phases": {phase: spread([row["phases"].get(phase, 0.0) for row in rows]) for phase in phases},
        "how": {how: [row["how"] for row in rows].count(how) for how in {row["how"] for row in rows}},
        "most_ranks_lost_at_once": max(row["ranks_lost"] for row in rows),
    }


def spread(values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values)
    middle, high = statistics.median(ordered), ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]
    return {"p50": round(middle, 3), "p95": round(high, 3), "max": round(ordered[-1], 3)}


def node_series(folder: Path, count: int, chance: random.Random) -> dict[str, Any]:
    """Loses a node with ranks again and again; a new one comes in its stead once training goes on."""
    from threenodes import kill, three_nodes

    rows: list[dict[str, Any]] = []
    failure = ""
    with three_nodes() as cluster:
        cluster.hold(2, 2, 2)
        with LiveRun(folder, *ELASTIC, f"cluster.address={cluster.address}") as run:
            try:
                for number in range(count):
                    run.wait_steps(STEPS_BETWEEN)
                    raylets = [node.all_processes["raylet"][0].process.pid for node in cluster.nodes]
                    victim = cluster.node_of(chance.choice(run.ranks(*raylets)))
                    rows.append(strike(run, chance, partial(kill, victim)))
                    print(number, json.dumps(rows[-1]), flush=True)
                    cluster.hold(2, 2, 2)
            except Ended as error:
                failure = str(error)
            status, whole = run.stop(), run.is_whole()
    return {**told(rows), "failure": failure, "exit_status": status, "every_step_once": whole, "rows": rows}


def soak(folder: Path, steps: int, seconds: float) -> dict[str, Any]:
    """A healthy run beside busy processes: whatever is called lost is a false alarm."""
    with LiveRun(folder, *TINY, f"run.steps={steps}", "cluster.address=local") as run, busy(4):
        growth, began = Growth({"driver": run.process.pid, "rank 0": run.rank_pids()[0]}), time.monotonic()
        with suppress(Ended):
            while (missing := steps - 1 - run.position()) > 0:
                growth.sample(run.members())
                run.wait_steps(min(SAMPLE_STEPS, missing), began + seconds - time.monotonic())
        took, done = time.monotonic() - began, run.position() + 1
        status = run.stop() if done < steps else run.process.wait(30)
        pace = sorted(row["step_seconds"] for row in run.rows())
    return {
        "steps": done,
        "seconds": round(took, 1),
        "busy_processes": 4,
        "step_seconds": {"p50": round(statistics.median(pace), 4), "max": round(pace[-1], 3)} if pace else {},
        "growth": {"each": f"{SAMPLE_STEPS} steps", **growth.told()},
        "false_alarms": run.count("lost") + run.count("recovered") + run.count("failure"),
        "exit_status": status,
    }


@contextmanager
def busy(count: int) -> Iterator[None]:
    processes = [multiprocessing.get_context("spawn").Process(target=_spin, daemon=True) for _ in range(count)]
    for process in processes:
        process.start()
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.join()


def _spin() -> None:
    while os.getppid() != 1:
        sum(range(100_000))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=0, help="ranks that get SIGKILL")
    parser.add_argument("--stops", type=int, default=0, help="ranks that get SIGSTOP")
    parser.add_argument("--nodes", type=int, default=0, help="nodes that are lost")
    parser.add_argument("--soak", type=int, default=0, help="steps of a healthy run beside four busy processes")
    parser.add_argument("--soak-seconds", type=float, default=300.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="results; those of other parts that are there already stay")
    args = parser.parse_args()
    chance = random.Random(args.seed)
    parts: dict[str, tuple[int, Callable[[Path], dict[str, Any]]]] = {
        "kills": (args.kills, lambda at: series(at, args.kills, signal.SIGKILL, chance)),
        "stops": (args.stops, lambda at: series(at, args.stops, signal.SIGSTOP, chance)),
        "nodes": (args.nodes, lambda at: node_series(at, args.nodes, chance)),
        "soak": (args.soak, lambda at: soak(at, args.soak, args.soak_seconds)),
    }
    for name, (count, measure) in parts.items():
        if count:
            with tempfile.TemporaryDirectory() as folder:
                record(args.json, name, partial(measure, Path(folder)))


if __name__ == "__main__":
    main()
