"""Searches for flipped bits by ranks, with and without a flip."""

from __future__ import annotations

import torch
from worker_processes import WorkerProcess, call_all, losses_and_state, ranks_of, start_run, uninterrupted

from pentad.orchestrator.recovery.bit_flips import Verdict, find_verdict
from pentad.schedules.spec.plan import Plan


def assert_a_check_changes_nothing(workers: list[WorkerProcess], plan: Plan, steps: int) -> None:
    """Also asserts that ranks without a fault agree."""
    with ranks_of(workers, plan.mesh.size) as ranks:
        expected = uninterrupted(ranks, plan, steps)
        start_run(ranks, plan)
        results = call_all(ranks, "run", 0, 2)
        checks = call_all(ranks, "check", 2)
        assert find_verdict(checks) is None
        assert call_all(ranks, "check", 2) == checks, "the same step is checked in the same way"
        results = [a + b for a, b in zip(results, call_all(ranks, "run", 2, steps - 2), strict=True)]
        losses, state = losses_and_state(ranks, results, 0)
        call_all(ranks, "close")
    assert losses == expected[0]
    assert all(torch.equal(state[key], value) for key, value in expected[1].items())


def verdict_after(workers: list[WorkerProcess], plan: Plan, rank: int, where: str) -> Verdict | None:
    """The result of a check after a bit of a rank was flipped (see `flip`)."""
    with ranks_of(workers, plan.mesh.size) as ranks:
        start_run(ranks, plan)
        call_all(ranks, "run", 0, 1)
        ranks[rank].answer(ranks[rank].call("flip", where))
        verdict = find_verdict(call_all(ranks, "check", 1))
        call_all(ranks, "close")
    return verdict
