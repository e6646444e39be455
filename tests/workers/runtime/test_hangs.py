"""One rank stops somewhere in a step: from the positions of all ranks the diagnosis names it, and who waits for it."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from plans import SHALLOW, plan_on_mesh
from small_models import MOE
from worker_processes import WorkerProcess, call_all, ranks_of, start_run

from pentad.schedules.spec.mesh import LAYER_AXES
from pentad.schedules.spec.plan import Plan
from pentad.schedules.spec.schedule_spec import MemoryOptions
from pentad.schedules.verify.hang_diagnosis import Diagnosis, Position, find_cause
from pentad.workers.lanes.progress_file import Progress, read_progress

pytestmark = pytest.mark.timeout(120)
slow = pytest.mark.slow
STEP, STOPPED = 2, 1
STILL_SECONDS, STILL_CPU_SECONDS = 1.0, 0.1
ZERO: dict[str, Any] = {"memory_options": MemoryOptions(zero=3)}
EXPERTS: dict[str, Any] = {"model": MOE}

CASES: list[Any] = [
    ("tp", {"tp": 2, "dp": 2}, {}),
    pytest.param("tp", {"tp": 2, "pp": 2}, {}, marks=slow),
    pytest.param("tp", {"tp": 4}, {}, marks=slow),
    pytest.param("cp", {"cp": 2, "pp": 2}, {}, marks=slow),
    pytest.param("cp", {"cp": 4}, {}, marks=slow),
    pytest.param("cp", {"cp": 2, "tp": 2}, {}, marks=slow),
    pytest.param("cp", {"cp": 2, "dp": 2}, {"cp_method": "all_gather"}, marks=slow),
    pytest.param("cp", {"cp": 2, "dp": 2}, {"cp_method": "ulysses"}, marks=slow),
    pytest.param("ep", {"ep": 2, "dp": 2}, EXPERTS, marks=slow),
    pytest.param("ep", {"ep": 4}, EXPERTS, marks=slow),
    pytest.param("ep", {"ep": 2, "pp": 2}, EXPERTS, marks=slow),
    pytest.param("ALL_REDUCE", {"dp": 2, "pp": 2}, {}, marks=slow),
    pytest.param("ALL_REDUCE", {"dp": 4}, {}, marks=slow),
    pytest.param("REDUCE_SCATTER", {"dp": 2, "pp": 2}, ZERO, marks=slow),
    pytest.param("ALL_GATHER", {"dp": 4}, ZERO, marks=slow),
    pytest.param("SEND_F", {"pp": 4}, {}, marks=slow),
    pytest.param("SEND_B", {"pp": 4}, {}, marks=slow),
    pytest.param("SEND_F", {"dp": 2, "pp": 2}, {}, marks=slow),
    pytest.param("STEP", {"dp": 2, "pp": 2}, {}, marks=slow),
]


@pytest.mark.parametrize("how", [pytest.param("process", marks=slow), "thread"])
@pytest.mark.parametrize(("where", "axes", "more"), CASES)
def test_a_hang_on_any_axis_names_the_rank_that_has_stopped(
    workers: list[WorkerProcess], corpus: str, where: str, axes: dict[str, int], more: dict[str, Any], how: str
) -> None:
    plan = plan_on_mesh(corpus, "1f1b", axes, dtype="float32", **{"model": SHALLOW} | more)
    with ranks_of(workers, plan.mesh.size) as ranks:
        start_run(ranks, plan)
        call_all([ranks[STOPPED]], "hang_at", where, STEP, how)
        asked = [rank.call("run", 0, STEP + 2) for rank in ranks]
        positions = stuck_positions(ranks, STOPPED, how)
        found = find_cause(plan.program, plan.mesh, positions, {STOPPED} if how == "process" else ())
        check_verdict(found, plan, where, how)
        if how == "process":
            ranks[STOPPED].signal(signal.SIGCONT)
        else:
            ranks[STOPPED].answer(ranks[STOPPED].call_now("resume"))
        for rank, number in zip(ranks, asked, strict=True):
            assert [result.step for result in rank.answer(number)] == list(range(STEP + 2))
        call_all(ranks, "close")


def check_verdict(found: Diagnosis, plan: Plan, where: str, how: str) -> None:
    assert found.causes == (STOPPED,), found.sentence
    assert found.cycle == ()
    at = plan.mesh.coordinates(STOPPED)
    place = where if where == "STEP" else f"{at.pp}{'F' if where in LAYER_AXES else where}"
    assert f"rank {STOPPED} ({at}) has been in {place}" in found.sentence, found.sentence
    assert ("without answering" in found.sentence) == (how == "process")
    others = {rank for rank in range(plan.mesh.size) if rank != STOPPED}
    assert {wait.rank for wait in found.waits} == others, found.sentence
    assert reaches(found, others, STOPPED)
    if where in LAYER_AXES:
        group = plan.mesh.group((where,), STOPPED)
        index = group.index(STOPPED)
        in_ring = {group[index - 1], group[(index + 1) % len(group)]}  # the others wait for these
        partners = (in_ring if plan.cp_method == "ring" and where == "cp" else {*group}) - {STOPPED}
        direct = {wait.rank for wait in found.waits if wait.peers == (STOPPED,) and wait.axis == where}
        assert direct == partners, (found.waits, found.sentence)


def reaches(found: Diagnosis, ranks: set[int], cause: int) -> bool:
    """Whether all these ranks wait for the cause, directly or through others."""
    known = {cause}
    while new := {wait.rank for wait in found.waits if known & {*wait.peers}} - known:
        known |= new
    return ranks <= known


def stuck_positions(ranks: list[WorkerProcess], stopped: int, how: str) -> list[Position]:
    """Where all ranks are once one has stopped and the others neither advance nor, on a busy machine, compute."""
    files: list[Path] = [rank.answer(rank.call_now("progress_file")) for rank in ranks]
    processes = [psutil.Process(rank.process.pid) for rank in ranks]
    while not has_stopped(ranks[stopped], how):
        time.sleep(0.05)
    before, cpu_before, since = list[Progress](), 0.0, time.monotonic()
    while True:
        now = [read_progress(file) for file in files]
        cpu = sum(times.user + times.system for times in (process.cpu_times() for process in processes))
        if now != before or cpu > cpu_before + STILL_CPU_SECONDS:
            before, cpu_before, since = now, cpu, time.monotonic()
        elif time.monotonic() > since + STILL_SECONDS:
            return [Position(at.step, at.counter, time.monotonic() - at.since, at.waits, at.axis) for at in now]
        time.sleep(0.05)


def has_stopped(rank: WorkerProcess, how: str) -> bool:
    if how == "process":
        stat = Path(f"/proc/{rank.process.pid}/stat").read_text()
        return stat.rpartition(")")[2].split()[0] == "T"
    return rank.answer(rank.call_now("has_stopped"))
