"""A GPU stops inside a layer, or its host does: from what the GPUs write the diagnosis names the rank."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
from gpus import RANKS_A_GPU, on_gpu, two_gpus
from plans import SHALLOW, plan_of
from small_models import MOE
from worker_processes import WorkerProcess, call_all, ranks_of, start_run

from pentad.schedules.verify.hang_diagnosis import Position, find_cause
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


@pytest.mark.parametrize(("transport", "how"), [("peer", "gpu"), ("nccl", "thread")])
@pytest.mark.parametrize(("where", "axes"), CASES)
def test_a_gpu_that_stops_inside_a_layer_is_the_cause(workers, corpus, where, axes, transport, how):
    check_hang(workers, plan_with(corpus, axes, transport), where, where, how)


@pytest.mark.parametrize("transport", ["peer", "nccl"])
def test_ranks_that_launch_graphs_tell_where_they_wait(workers, corpus, transport):
    plan = replace(plan_with(corpus, {"tp": 2}, transport), cuda_graphs=True)
    check_hang(workers, plan, "F", "tp", "thread")


def plan_with(corpus, axes, transport):
    given = {"name": "1f1b", "dp": 1, "pp": 1, "microbatches": 4, "data": corpus, "model": SHALLOW, "dtype": "float32"}
    return on_gpu(plan_of(**given | axes), transport)


def check_hang(workers, plan, where, axis, how):
    """All ranks of the axis wait for the one that has stopped, and it goes on once it can."""
    with ranks_of(workers, plan.mesh.size) as ranks:
        start_run(ranks, plan)
        call_all([ranks[STOPPED]], "hang_at", where, STEP, how)
        asked = [rank.call("run", 0, STEP + 2) for rank in ranks]
        found = find_cause(plan.program, plan.mesh, still_positions(ranks))
        assert found.causes == (STOPPED,), found.sentence
        partners = {*plan.mesh.group((axis,), STOPPED)} - {STOPPED}
        direct = {wait.rank for wait in found.waits if wait.peers == (STOPPED,) and wait.axis == axis}
        assert direct == partners, found.sentence
        assert f"(in its {axis} group)" in found.sentence and "0F0" in found.sentence
        assert {wait.rank for wait in found.waits} == {*range(plan.mesh.size)} - {STOPPED}, found.sentence
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
