"""Counts what is named slow or starved in many steps in which nothing is injected, on CPU ranks of a busy machine.

PYTHONPATH=.typings:tests/support python tests/bench/quiet_steps.py --steps 2000 --json OUT [KEY=VALUE ...]

The ranks are processes without Ray. The same times are judged a second time by seconds alone, as if no rank had told
how long it was starved (`by_seconds`).
"""

from __future__ import annotations

import argparse
import pickle
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from record import record
from worker_processes import WorkerProcess, call_all, start_run

from pentad.orchestrator.config.config import load
from pentad.orchestrator.planning.planning import make_plan
from pentad.orchestrator.run.measure import History
from pentad.schedules.diagnosis.rank_times import RankTime
from pentad.schedules.diagnosis.slow_ranks import SlowRanks
from pentad.schedules.simulate.timeline import COMPUTE
from pentad.schedules.spec.plan import Plan

CALL, LIMIT = 10, 600.0  # steps of a call, and seconds that it may take
Steps = list[tuple[RankTime, ...]]


def run(plan: Plan, steps: int, most: float) -> tuple[Steps, list[float]]:
    """Every rank's times in each step, and the seconds of the steps, for at most `most` seconds in total."""
    workers = [WorkerProcess() for _ in range(plan.mesh.size)]
    try:
        start_run(workers, plan)
        history, found, seconds = History(plan, 1, keep=1), Steps(), list[float]()
        for first in range(0, steps, CALL):
            rows = history.add(call_all(workers, "run", first, CALL, seconds=LIMIT))
            found += [row["rank_times"] for row in rows]
            seconds += [row["step_seconds"] for row in rows]
            if sum(seconds) > most:
                break
        return found, seconds
    finally:
        for worker in workers:
            worker.stop()


def named(plan: Plan, steps: Steps) -> list[dict[str, Any]]:
    watch = SlowRanks(plan.program, plan.mesh)
    changes = [change for times in steps for change in watch.add(times)]
    return [each._asdict() for each in changes if not each.over]


def starved_share(steps: Sequence[tuple[RankTime, ...]]) -> float:
    """Fraction of the seconds of compute, waits aside, in which ranks were starved."""
    compute = [each for times in steps for each in times if each.op in COMPUTE]
    starved = sum(each.starved for each in compute)
    return starved / sum(each.own + each.starved for each in compute)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="that they may take")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--times", type=Path, help="a file for all times")
    parser.add_argument("keys", nargs="*", help="of the configuration")
    asked = parser.parse_args()
    record(asked.json, " ".join(asked.keys), lambda: judged(make_plan(load(None, asked.keys), "cpu"), asked))


def judged(plan: Plan, asked: argparse.Namespace) -> dict[str, Any]:
    steps, seconds = run(plan, asked.steps, asked.seconds)
    if asked.times:
        asked.times.write_bytes(pickle.dumps((plan, steps)))
    found = named(plan, steps)
    by_seconds = named(plan, [tuple(each._replace(starved=0.0) for each in times) for times in steps])
    return {
        "steps": len(steps),
        "step_seconds": median(seconds),
        "starved_share": starved_share(steps),
        "named": dict(Counter(each["kind"] for each in found)),
        "by_seconds": dict(Counter(each["kind"] for each in by_seconds)),
        "names": found,
    }


if __name__ == "__main__":
    main()
