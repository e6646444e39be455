"""A GPU or its host stops inside a layer: from the progress that GPUs write, the diagnosis names the rank."""

from __future__ import annotations

import time
from typing import Any

import pytest
from gpus import RANKS_A_GPU, on_gpu, two_gpus
from plans import SHALLOW, plan_of
from small_models import MOE
from worker_processes import WorkerProcess, call_all, ranks_of, start_run

from pentad.schedules.compiler import NO_MEMORY_OPTIONS
from pentad.schedules.spec.plan import Plan
from pentad.schedules.spec.schedule_spec import MemoryOptions
from pentad.schedules.verify.hang_diagnosis import Diagnosis, Position, find_cause
from pentad.workers.lanes.progress_file import Progress

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120 * RANKS_A_GPU), two_gpus]
STEP, STOPPED, STILL_SECONDS = 4, 1, 2.0
CASES: list[tuple[str, dict[str, Any]]] = [
    ("tp", {"tp": 2}),
    ("cp", {"cp": 2}),
    ("cp", {"cp": 2, "cp_method": "all_gather"}),
    ("ep", {"ep": 2, "model": MOE}),
    ("tp", {"tp": 2, "cp": 2}),
    ("cp", {"tp": 2, "cp": 2}),
    ("ep", {"ep": 2, "dp": 2, "model": MOE}),
    ("tp", {"tp": 2, "pp": 2, "name": "dualpipev"}),
]
STOPS: list[tuple[str, dict[str, Any]]] = [
    ("F", {"dp": 2}),
    ("ALL_REDUCE", {"dp": 2}),
    ("ALL_GATHER", {"dp": 2, "memory_options": MemoryOptions(zero=3), "unit_layers": 1}),
    ("STEP", {"dp": 2, "pp": 2}),
    ("SEND_B", {"pp": 4}),
]


@pytest.mark.parametrize(("transport", "how"), [("peer", "gpu"), ("nccl", "thread")])
@pytest.mark.parametrize(("where", "axes"), CASES)
def test_a_gpu_that_stops_inside_a_layer_is_the_cause(workers, corpus, where, axes, transport, how):
    """All ranks of the axis wait for it, and all others for it or these; they go on once it can."""
    plan = plan_with(corpus, axes, transport)
    with ranks_of(workers, plan.mesh.size) as ranks:
        asked, found = hang(ranks, plan, where, how)
        partners = {*plan.mesh.group((where,), STOPPED)} - {STOPPED}
        direct = {wait.rank for wait in found.waits if wait.peers == (STOPPED,) and wait.axis == where}
        assert direct == partners, found.sentence
        before, after = found.sentence.split(f"; rank {STOPPED} ")
        axes = {wait.axis for wait in found.waits if STOPPED in wait.peers}  # the sentence has the longest wait
        assert any(f"in 0F0 (in its {axis} group)" in before for axis in axes) and "has been in 0F0 for" in after
        check_others(ranks, asked, found)


@pytest.mark.parametrize("transport", ["peer", "nccl"])
@pytest.mark.parametrize(("where", "axes"), STOPS)
def test_a_host_that_stops_issuing_is_the_cause(workers, corpus, where, axes, transport):
    plan = plan_with(corpus, axes, transport)
    with ranks_of(workers, plan.mesh.size) as ranks:
        asked, found = hang(ranks, plan, where, "thread")
        assert where in found.sentence
        check_others(ranks, asked, found)


def plan_with(corpus: str, axes: dict[str, Any], transport: str) -> Plan:
    small: dict[str, Any] = {"microbatches": 4, "data": corpus, "model": SHALLOW, "dtype": "float32"}
    options = axes.get("memory_options", NO_MEMORY_OPTIONS)
    return on_gpu(plan_of(**{"name": "1f1b", "dp": 1, "pp": 1, **small, **axes}), transport, memory_options=options)


def hang(ranks: list[WorkerProcess], plan: Plan, where: str, how: str) -> tuple[list[int], Diagnosis]:
    """The calls that run the steps, and the diagnosis of why they do not end."""
    start_run(ranks, plan)
    call_all([ranks[STOPPED]], "hang_at", where, STEP, how)
    asked = [rank.call("run", 0, STEP + 2) for rank in ranks]
    return asked, find_cause(plan.program, plan.mesh, still_positions(ranks))


def check_others(ranks: list[WorkerProcess], asked: list[int], found: Diagnosis) -> None:
    """All others wait for the rank that has stopped, and go on once it does."""
    assert found.causes == (STOPPED,), found.sentence
    assert {wait.rank for wait in found.waits} == {*range(len(ranks))} - {STOPPED}, found.sentence
    ranks[STOPPED].answer(ranks[STOPPED].call_now("resume"))
    for rank, number in zip(ranks, asked, strict=True):
        assert [result.step for result in rank.answer(number)] == list(range(STEP + 2))
    call_all(ranks, "close")


def still_positions(ranks: list[WorkerProcess]) -> list[Position]:
    """Where all ranks are once one has stopped and the others no longer move."""
    began = time.monotonic()
    while not ranks[STOPPED].answer(ranks[STOPPED].call_now("has_stopped")):
        assert time.monotonic() < began + 30 * RANKS_A_GPU, "the rank has not come to where it is to stop"
        time.sleep(0.05)
    before, since = list[Progress](), time.monotonic()
    while True:
        now = [rank.answer(rank.call_now("position")) for rank in ranks]
        if now != before:
            before, since = now, time.monotonic()
        elif time.monotonic() > since + STILL_SECONDS:
            return [Position(at.step, at.counter, time.monotonic() - at.since, at.waits, at.axis) for at in now]
        time.sleep(0.05)
