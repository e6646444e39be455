"""Slow compute, loading, links or pauses of one of four real ranks are named within ten steps; what a busy machine does
to the ranks is not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from plans import MODEL, plan_on_mesh
from worker_processes import WorkerProcess, call_all, ranks_of, start_run

from pentad.orchestrator.run.measure import History
from pentad.schedules.diagnosis.slow_ranks import BASELINE, WARM_UP, WINDOW, SlowRank, SlowRanks
from pentad.schedules.spec.plan import Plan

pytestmark = pytest.mark.timeout(240)
slow = pytest.mark.slow
PADS = {"F": 0.02, "BW": 0.04}  # seconds
SLOW, LAST = 2, 3  # of four ranks; those in the middle of a pipeline load nothing
WITHIN, BUSY_STEPS = 10, 100
MESHES = {"dp2pp2": {"dp": 2, "pp": 2}, "pp4": {"pp": 4}, "tp2dp2": {"tp": 2, "dp": 2}, "cp2pp2": {"cp": 2, "pp": 2}}
KINDS = ["compute", "loader", "link", "pauses"]
CELLS = [
    pytest.param("dp2pp2", "doubled compute", marks=pytest.mark.quiet),
    *(
        pytest.param(mesh, kind, marks=[slow, pytest.mark.quiet])
        for mesh in MESHES
        for kind in KINDS
        if kind != "link" or "pp" in MESHES[mesh]
    ),
]


@pytest.mark.parametrize(("mesh", "kind"), CELLS)
def test_what_is_slow_on_a_real_rank_is_named_within_ten_steps(
    workers: list[WorkerProcess], corpus: str, mesh: str, kind: str
) -> None:
    plan = small_plan(corpus, mesh)
    quiet = WARM_UP + WINDOW + (BASELINE if mesh == "pp4" else 0)
    with ranks_of(workers, plan.mesh.size) as ranks:
        start_run(ranks, plan)
        call_all(ranks, "pad_compute", PADS)
        watch, history = SlowRanks(plan.program, plan.mesh), History(plan, 1, keep=1)
        assert [found for step in range(quiet) for found in step_of(ranks, watch, history, step)] == []
        slow_rank = {"link": source_of_link(plan), "loader": LAST}.get(kind, SLOW)
        with injected(ranks[slow_rank], kind):
            named = first_named(ranks, watch, history, quiet)
        call_all(ranks, "close")
    expected = {"loader": "data", "link": "link"}.get(kind, "compute")
    assert named is not None and named.kind == expected
    assert named.ranks == ((slow_rank, slow_rank + plan.mesh.size // plan.mesh.pp) if kind == "link" else (slow_rank,))
    assert not named.over and named.step < quiet + WITHIN


@slow
@pytest.mark.parametrize("mesh", MESHES)
def test_a_busy_machine_has_no_slow_rank_in_a_hundred_steps(
    workers: list[WorkerProcess], corpus: str, mesh: str
) -> None:
    """Steps are slower because other processes use the cores, too. All ranks share two cores: pinned to one of them
    beside a busy thread, a rank would indeed be slow."""
    plan = small_plan(corpus, mesh)
    with ranks_of(workers, plan.mesh.size) as ranks, busy_cores(ranks):
        start_run(ranks, plan)
        watch, history = SlowRanks(plan.program, plan.mesh), History(plan, 1, keep=1)
        rows = [row for first in range(0, BUSY_STEPS, 10) for row in history.add(call_all(ranks, "run", first, 10))]
        call_all(ranks, "close")
    named = [found for row in rows for found in watch.add(row["rank_times"]) if not found.over]
    print(f"{mesh}: {len(named)} named in {len(rows)} steps: {named}")
    assert not [found for found in named if found.kind != "starved"]


def small_plan(corpus: str, mesh: str) -> Plan:
    layers = max(2, MESHES[mesh].get("pp", 1))
    return plan_on_mesh(corpus, "1f1b", MESHES[mesh], dtype="float32", model=replace(MODEL, layers=layers))


@contextmanager
def busy_cores(ranks: list[WorkerProcess]) -> Iterator[None]:
    cores = sorted(os.sched_getaffinity(0))
    load = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in cores[:2]]
    pids = [rank.process.pid for rank in ranks]
    try:
        pin([*pids, *(process.pid for process in load)], cores[:2])
        yield
    finally:
        for process in load:
            process.kill()
            process.wait()
        pin(pids, cores)


def pin(pids: list[int], cores: list[int]) -> None:
    """Pins all threads of these processes to these cores."""
    for pid in pids:
        for thread in os.listdir(f"/proc/{pid}/task"):
            os.sched_setaffinity(int(thread), cores)


def source_of_link(plan: Plan) -> int:
    """The first rank of the last but one stage."""
    return (plan.mesh.pp - 2) * plan.mesh.size // plan.mesh.pp


def step_of(ranks: list[WorkerProcess], watch: SlowRanks, history: History, step: int) -> list[SlowRank]:
    (row,) = history.add(call_all(ranks, "run", step, 1))
    return watch.add(row["rank_times"])


def first_named(ranks: list[WorkerProcess], watch: SlowRanks, history: History, first: int) -> SlowRank | None:
    for step in range(first, first + WITHIN):
        if found := step_of(ranks, watch, history, step):
            assert len(found) == 1, found
            return found[0]
    return None


@contextmanager
def injected(rank: WorkerProcess, kind: str) -> Iterator[None]:
    arguments: dict[str, tuple[Any, ...]] = {
        "compute": ("slow_compute", 1.15),
        "doubled compute": ("slow_compute", 2.0),
        # Four ranks on two cores are starved for up to 0.055 s a step; a loader counts only beyond that.
        "loader": ("slow_loader", 0.1),
        "link": ("slow_link", "SEND_F", 0.03),
    }
    if kind != "pauses":
        rank.answer(rank.call(*arguments[kind]))
        yield
        return
    ended = threading.Event()
    pausing = threading.Thread(target=_pause, args=(rank, ended))
    pausing.start()
    try:
        yield
    finally:
        ended.set()
        pausing.join()


def _pause(rank: WorkerProcess, ended: threading.Event) -> None:
    """Stops the process for 30 ms of every 90."""
    while not ended.wait(0.06):
        rank.signal(signal.SIGSTOP)
        ended.wait(0.03)
        rank.signal(signal.SIGCONT)
