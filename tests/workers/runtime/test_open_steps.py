"""Calls that leave their last step open: every step is reported once, in order, with the bits of one long call."""

from __future__ import annotations

import signal
import time

import pytest
import torch
from bits import assert_same_runs
from plans import SHALLOW, plan_of
from resume import commit
from worker_processes import call_all, losses_and_state, recover, start_run, uninterrupted

from pentad.workers.abort import Aborted
from pentad.workers.checkpoint import checkpoint, shards

pytestmark = pytest.mark.timeout(150)
slow = pytest.mark.slow
SPLITS = {
    "one step per call": [*((step, 1, True) for step in range(5)), (5, 1, False)],
    "closed by a call of no step": [(0, 6, True), (6, 0, False)],
    "closed in between": [(0, 2, True), (2, 0, False), (2, 1, False), (3, 2, True), (5, 1, True), (6, 0, False)],
    "calls of no step": [(0, 0, True), (0, 0, False), (0, 3, True), (3, 0, True), (3, 3, True), (6, 0, True), (6, 0)],
}
SLOW = [
    ("zb-h2", 2, 2, 4, True),
    ("zb-h2", 1, 4, 8, True),
    ("zb-v", 2, 2, 5, True),
    ("dualpipe", 1, 4, 8, True),
    ("dualpipe", 1, 4, 8, False),
]
CASES = [("zb-h2", 1, 2, 4, True), ("1f1b", 1, 2, 3, False), *(pytest.param(*case, marks=slow) for case in SLOW)]
STEPS = 16


def plan_for(name, corpus, *, post_validation, clip=0.5):
    return plan_of(name, 2, 2, 4, corpus, "float32", post_validation=post_validation, clip=clip)


def steps_by_rank(results) -> list[list[int]]:
    return [[result.step for result in of_rank] for of_rank in results]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("name", "dp", "pp", "m", "post_validation"), CASES)
def test_split_calls_equal_one_call(fleet, corpus, name, dp, pp, m, post_validation):
    plan = plan_of(name, dp, pp, m, corpus, "float32", post_validation=post_validation, model=SHALLOW)
    expected = fleet.run(plan, [(0, 6)])
    for calls in SPLITS.values():
        assert_same_runs(fleet.run(plan, calls), expected)


@pytest.mark.slow
@pytest.mark.parametrize("post_validation", [True, pytest.param(False, marks=slow)])
def test_a_call_returns_the_steps_that_are_complete(workers, corpus, post_validation):
    start_run(workers, plan_for("zb-h2", corpus, post_validation=post_validation))
    asked = [(0, 1, True), (1, 1, True), (2, 3, True), (5, 0, True), (5, 2, False), (7, 1, True), (8, 0, False)]
    returned = [steps_by_rank(call_all(workers, "run", *call))[3] for call in asked]
    call_all(workers, "close")
    assert returned == [[], [0], [1, 2, 3], [], [4, 5, 6], [], [7]]


@pytest.mark.slow
@pytest.mark.parametrize("post_validation", [True, pytest.param(False, marks=slow)])
def test_saving_completes_the_open_step(workers, corpus, tmp_path, post_validation):
    plan = plan_for("zb-h2", corpus, post_validation=post_validation)
    start_run(workers, plan)
    losses, after = losses_and_state(workers, [*call_all(workers, "run", 0, 3)], 0)
    rest, end = losses_and_state(workers, call_all(workers, "run", 3, 3), 0)
    call_all(workers, "close")

    start_run(workers, plan)
    folder = checkpoint.folder_of(tmp_path, 3)
    done = [call_all(workers, "run", 0, 3, True)]
    commit(folder, 3, [entry for entries in call_all(workers, "save", str(folder), 3) for entry in entries])
    done += [call_all(workers, "run", 3, 3, True), call_all(workers, "run", 6, 0)]
    found, state = losses_and_state(workers, [of_rank for call in done for of_rank in call], 0)
    call_all(workers, "close")
    assert [steps_by_rank(call)[0] for call in done] == [[0, 1], [2, 3, 4], [5]]
    assert found == losses | rest
    assert all(torch.equal(state[key], value) for key, value in end.items())
    opened = checkpoint.open_checkpoint(folder)
    saved = shards.read(opened, opened.tensors)
    assert all(torch.equal(saved[key], value) for key, value in after.items())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("post_validation", "clip", "committed"),
    [
        (True, 100.0, 3),  # no rank has the norm of step 3
        pytest.param(True, 1e-3, 4, marks=slow),  # step 2 was clipped, so step 3 has waited for its own norm
        pytest.param(False, 0.5, 4, marks=slow),
    ],
)
def test_an_open_step_counts_after_an_abort_if_it_was_committed(workers, corpus, post_validation, clip, committed):
    plan = plan_for("zb-h2", corpus, post_validation=post_validation, clip=clip)
    expected = uninterrupted(workers, plan, 6)
    start_run(workers, plan)
    done = call_all(workers, "run", 0, 4, True)
    workers[1].signal(signal.SIGKILL)
    version, snapshots = recover(workers, [1], plan, 2)
    assert version == committed
    for snapshot in snapshots.values():
        assert [result.step for result in snapshot.results] == list(range(version))
    done += [list(snapshot.results) for snapshot in snapshots.values()]
    losses, state = losses_and_state(workers, done + call_all(workers, "run", version, 6 - version), 0)
    call_all(workers, "close")
    assert losses == expected[0]
    assert all(torch.equal(state[key], value) for key, value in expected[1].items())


@pytest.mark.parametrize(
    ("name", "post_validation", "fault"),
    [
        pytest.param("zb-h2", True, signal.SIGKILL, marks=slow),
        pytest.param("1f1b", False, signal.SIGKILL, marks=slow),
        pytest.param("zb-h2", True, signal.SIGSTOP, marks=slow),
        pytest.param("1f1b", False, signal.SIGSTOP, marks=slow),
    ],
)
def test_a_fault_between_open_calls_loses_no_result(workers, corpus, name, post_validation, fault):
    plan = plan_for(name, corpus, post_validation=post_validation)
    expected = uninterrupted(workers, plan, STEPS)
    start_run(workers, plan)
    asked = [[worker.call("run", step, 2, True) for step in range(0, STEPS, 2)] for worker in workers]
    workers[1].wait_for_step(5)
    workers[1].signal(fault)
    time.sleep(0.3)
    version, snapshots = recover(workers, [1], plan, 2)
    assert 0 < version < STEPS, "the fault came too early or too late for this test"
    for rank, snapshot in snapshots.items():
        reported = list(snapshot.results)
        for number in asked[rank]:
            try:
                reported += workers[rank].answer(number)
            except (Aborted, RuntimeError):
                continue
        assert {result.step for result in reported} == set(range(snapshot.version))
    done = call_all(workers, "run", version, STEPS - version)
    known = [list(snapshot.results) for snapshot in snapshots.values()]
    first = min(result.step for results in known for result in results)
    losses, state = losses_and_state(workers, known + done, first)
    call_all(workers, "close")
    assert losses == {step: loss for step, loss in expected[0].items() if step >= first}
    assert all(torch.equal(state[key], value) for key, value in expected[1].items())
