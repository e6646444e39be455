"""Injects faults into runs of `pentad train` on CPUs: times to detect and to recover, and leaks.

PYTHONPATH=.typings:tests/support python tests/bench/faults.py --kills 50 --stops 20 --nodes 6 --soak 5000
PYTHONPATH=.typings:tests/support python tests/bench/faults.py --kills 10 --spared-kills 10
PYTHONPATH=.typings:tests/support python tests/bench/faults.py --nodes 20 --unprepared-nodes 20

Kills and stops hit one run again and again: a random rank gets SIGKILL or SIGSTOP within a second after the run has
made a few steps. One rank is spared, so that growth over all recoveries shows in it. `--spared-kills` come while a
spare (elastic.spares) is ready. A node is lost by SIGKILL of its raylet, on a cluster of a head and three nodes: once
spares are ready on the node without ranks, or, unprepared, without spares (elastic.spares=0). Times are from the
journal.
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
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from growth import Growth, files_of, leftovers
from live import SPARED_RANK, Ended, LiveRun
from record import record

STEPS_BETWEEN_FAULTS = 3
HANG_SECONDS = 3.0
SAMPLE_STEPS = 250
LOAD_PROCESSES = 4
LIMIT_SECONDS = 90.0
ELASTIC = ("elastic.max_failures=1000000", "run.steps=1000000", f"elastic.hang_seconds={HANG_SECONDS:g}")
TINY = ("mesh.dp=1", "mesh.pp=2", "batch.global_batch_size=4", "batch.sequence_length=32")  # steps of about 10 ms


def inject(run: LiveRun, rng: random.Random, fault: Callable[[], None]) -> dict[str, Any]:
    """Injects a fault and waits until the run continues.

    `noticed` is in seconds since the fault; `recovered` and `stepped` (the first step) are in seconds since it was
    noticed.
    """
    run.wait_steps(STEPS_BETWEEN_FAULTS)
    time.sleep(rng.random())
    step, injected = run.last_step(), time.time()
    fault()
    lost = run.event("lost", LIMIT_SECONDS, injected)
    recovered = run.event("recovered", LIMIT_SECONDS, injected)
    return {
        "step": step,
        "rank": lost["rank"],
        "fault": lost["fault"],
        "detector": lost["detector"],
        "cause": lost["cause"],
        "noticed": lost["time"] - injected,
        "recovered": recovered["time"] - lost["time"],
        "stepped": run.wait_generation(recovered["generation"], LIMIT_SECONDS) - lost["time"],
        "how": recovered["how"],
        "phases": recovered["seconds"],
        "steps_replayed": recovered["steps_replayed"],
        "spares": len(recovered["spares"]),
        "ranks_lost": run.count("lost", injected),
    }


def process_faults(folder: Path, count: int, signal_number: int, rng: random.Random, spares: int = 0) -> dict[str, Any]:
    """Sends a signal to a rank of one run `count` times, and samples the run's resources after each recovery."""
    rows: list[dict[str, Any]] = []
    failure = ""
    with LiveRun(folder, *ELASTIC, "cluster.address=local", f"elastic.spares={spares}") as run:
        run.wait_steps(STEPS_BETWEEN_FAULTS)
        spared = run.rank_pids()[SPARED_RANK]
        growth = Growth({"driver": run.process.pid, "spared rank": spared})
        files = files_of(run.members())
        growth.sample(run.members())
        try:
            for number in range(count):
                run.wait_until(lambda: run.status()["spares"] == spares, LIMIT_SECONDS)
                victim = rng.choice([rank["pid"] for rank in run.status()["ranks"] if rank["pid"] != spared])
                rows.append({"struck_pid": victim, **inject(run, rng, partial(os.kill, victim, signal_number))})
                rows[-1]["struck_is_gone"] = not psutil.pid_exists(victim)
                run.wait_steps(STEPS_BETWEEN_FAULTS)
                growth.sample(run.members())
                print(number, json.dumps(rows[-1]), flush=True)
        except Ended as error:
            failure = str(error)
        members = run.members()
        files |= files_of(members)
        status = run.stop()
        complete = run.has_every_step_once()
    return {
        **summarize(rows, HANG_SECONDS if signal_number == signal.SIGSTOP else 0.0),
        "failure": failure,
        "exit_status": status,
        "every_step_once": complete,
        "growth": growth.summary(),
        "left_after_the_run": leftovers(members, files),
        "rows": rows,
    }


def summarize(rows: Sequence[dict[str, Any]], deadline: float = 0.0) -> dict[str, Any]:
    """Percentiles in seconds; `deadline` is how long a rank may be silent before it is called hung."""
    if not rows:
        return {"count": 0}
    phases = sorted({phase for row in rows for phase in row["phases"]})
    return {
        "count": len(rows),
        "noticed_after_deadline": percentiles([row["noticed"] - deadline for row in rows]),
        "deadline_seconds": deadline,
        "recovered_after_noticed": percentiles([row["recovered"] for row in rows]),
        "first_step_after_noticed": percentiles([row["stepped"] for row in rows]),
        "phases": {phase: percentiles([row["phases"].get(phase, 0.0) for row in rows]) for phase in phases},
        "how": dict(Counter(row["how"] for row in rows)),
        "ranks_taken_by_spares": sum(row["spares"] for row in rows),
        "most_ranks_lost_at_once": max(row["ranks_lost"] for row in rows),
    }


def percentiles(values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values)
    p95 = ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]
    return {"p50": round(statistics.median(ordered), 3), "p95": round(p95, 3), "max": round(ordered[-1], 3)}


def node_faults(folder: Path, count: int, rng: random.Random, spares: int | None) -> dict[str, Any]:
    """Kills a node with ranks `count` times, and adds a new node each time training has continued."""
    from multinode import kill, multinode_cluster

    rows: list[dict[str, Any]] = []
    failure, key = "", "null" if spares is None else str(spares)
    with multinode_cluster() as cluster:
        cluster.resize(2, 2, 2)
        with LiveRun(folder, *ELASTIC, f"cluster.address={cluster.address}", f"elastic.spares={key}") as run:
            try:
                for number in range(count):
                    run.wait_steps(STEPS_BETWEEN_FAULTS)
                    run.wait_until(lambda: run.status()["spares"] == (2 if spares is None else spares), LIMIT_SECONDS)
                    before = [rank["pid"] for rank in run.status()["ranks"]]
                    rows.append(inject(run, rng, partial(kill, cluster.node_of(rng.choice(before)))))
                    new = {rank["pid"] for rank in run.status()["ranks"]} - set(before)
                    rows[-1] |= {"next_step": rows[-1]["noticed"] + rows[-1]["stepped"]}
                    rows[-1] |= {"cpu_seconds_of_new_ranks": round(sum(map(cpu_seconds, new)), 2)}
                    print(number, json.dumps(rows[-1]), flush=True)
                    cluster.resize(2, 2, 2)
            except Ended as error:
                failure = str(error)
            status, complete = run.stop(), run.has_every_step_once()
    next_step = percentiles([row["next_step"] for row in rows]) if rows else {}
    facts = {"failure": failure, "exit_status": status, "every_step_once": complete}
    return {**summarize(rows), "next_step_after_fault": next_step, **facts, "rows": rows}


def cpu_seconds(pid: int) -> float:
    """CPU seconds of a process since it started."""
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


def soak(folder: Path, steps: int, seconds: float) -> dict[str, Any]:
    """A healthy run on a loaded machine: any rank reported lost is a false alarm."""
    with LiveRun(folder, *TINY, f"run.steps={steps}", "cluster.address=local") as run, cpu_load(LOAD_PROCESSES):
        growth, began = Growth({"driver": run.process.pid, "rank 0": run.rank_pids()[0]}), time.monotonic()
        with suppress(Ended):
            while (missing := steps - 1 - run.last_step()) > 0:
                growth.sample(run.members())
                run.wait_steps(min(SAMPLE_STEPS, missing), began + seconds - time.monotonic())
        seconds_taken, done = time.monotonic() - began, run.last_step() + 1
        status = run.stop() if done < steps else run.process.wait(30)
        times = sorted(row["step_seconds"] for row in run.rows())
    return {
        "steps": done,
        "seconds": round(seconds_taken, 1),
        "busy_processes": LOAD_PROCESSES,
        "step_seconds": {"p50": round(statistics.median(times), 4), "max": round(times[-1], 3)} if times else {},
        "growth": {"each": f"{SAMPLE_STEPS} steps", **growth.summary()},
        "false_alarms": run.count("lost") + run.count("recovered") + run.count("failure"),
        "exit_status": status,
    }


@contextmanager
def cpu_load(count: int) -> Iterator[None]:
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
    parser.add_argument("--kills", type=int, default=0, help="number of SIGKILLs to ranks")
    parser.add_argument("--spared-kills", type=int, default=0, help="number of SIGKILLs with a spare")
    parser.add_argument("--stops", type=int, default=0, help="number of SIGSTOPs to ranks")
    parser.add_argument("--nodes", type=int, default=0, help="number of nodes to kill")
    parser.add_argument("--unprepared-nodes", type=int, default=0, help="number of nodes to kill without spares")
    parser.add_argument("--soak", type=int, default=0, help="steps of a healthy run under CPU load")
    parser.add_argument("--soak-seconds", type=float, default=300.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="JSON file of the results; other sections in it are left as they are")
    args = parser.parse_args()
    rng = random.Random(args.seed)
    sections: dict[str, tuple[int, Callable[[Path], dict[str, Any]]]] = {
        "kills": (args.kills, lambda folder: process_faults(folder, args.kills, signal.SIGKILL, rng)),
        "spared_kills": (
            args.spared_kills,
            lambda folder: process_faults(folder, args.spared_kills, signal.SIGKILL, rng, spares=1),
        ),
        "stops": (args.stops, lambda folder: process_faults(folder, args.stops, signal.SIGSTOP, rng)),
        "nodes": (args.nodes, lambda folder: node_faults(folder, args.nodes, rng, None)),
        "unprepared_nodes": (args.unprepared_nodes, lambda folder: node_faults(folder, args.unprepared_nodes, rng, 0)),
        "soak": (args.soak, lambda folder: soak(folder, args.soak, args.soak_seconds)),
    }
    for name, (count, measure) in sections.items():
        if count:
            with tempfile.TemporaryDirectory() as path:
                record(args.json, name, partial(measure, Path(path)))


if __name__ == "__main__":
    main()
