"""Ranks on GPUs that lose a partner: the others are freed, and the run ends with the bits of one without a loss."""

from __future__ import annotations

import signal
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from gpus import RANKS_A_GPU, on_gpu, two_gpus
from plans import plan_of
from small_models import WIDE, WIDE_MOE
from worker_processes import (
    WorkerProcess,
    call_all,
    check_recovery,
    losses_and_state,
    ranks_of,
    start_run,
    uninterrupted,
)

from pentad.schedules.spec.mesh import hosts_of_size
from pentad.schedules.spec.schedule_spec import MemoryOptions
from pentad.workers.abort import Aborted

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120 * RANKS_A_GPU), two_gpus]
STEPS = 24
Case = tuple[str, dict[str, Any]]
PIPELINES: list[Case] = [("1f1b", {"dp": 2, "pp": 2}), ("zb-h2", {"dp": 2, "pp": 2}), ("dualpipe", {"pp": 4})]
PAIRS: list[Case] = [("1f1b", {"dp": 2}), ("1f1b", {"cp": 2, "model": WIDE})]
SHARED_LAYERS: list[Case] = [
    ("1f1b", {"dp": 2, "tp": 2, "model": WIDE}),
    ("1f1b", {"dp": 2, "ep": 2, "model": WIDE_MOE}),
    ("dualpipe", {"pp": 2, "ep": 2, "model": WIDE_MOE}),
    ("1f1b", {"cp": 4, "model": WIDE}),
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("name", "axes", "transport", "fault"),
    [(*case, "peer", fault) for case in PAIRS for fault in (signal.SIGKILL, None)]
    + [(*case, transport, signal.SIGKILL) for case in PIPELINES for transport in ("peer", "nccl")]
    + [(*PIPELINES[0], "peer", None), (*PIPELINES[1], "nccl", None)]
    + [(*case, "peer", signal.SIGKILL) for case in SHARED_LAYERS],
)
def test_a_run_that_loses_a_rank_ends_with_the_same_bits(workers, corpus, name, axes, transport, fault):
    plan = plan_of(**{"name": name, "dp": 1, "pp": 1, "microbatches": 8, "data": corpus, "dtype": "float32", **axes})
    check_recovery(workers, on_gpu(plan, transport), STEPS, fault)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("zero", [1, 3])
@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_whose_peer_is_lost_under_zero_is_freed(workers, corpus, fault, zero):
    """No other rank has the lost shards, so the run begins again."""
    plan = plan_of("1f1b", 2, 1, 4, corpus, "float32", memory_options=MemoryOptions(zero=zero), unit_layers=1)
    plan = on_gpu(plan, memory_options=MemoryOptions(zero=zero))
    with ranks_of(workers, 2) as ranks:
        expected = uninterrupted(ranks, plan, 6)
        start_run(ranks, plan)
        asked = [rank.call("run", 0, 10_000) for rank in ranks]
        ranks[1].wait_for_step(3)
        ranks[1].signal(fault)
        time.sleep(0.3)
        for method in ("fence", "abort"):
            ranks[0].answer(ranks[0].call_now(method))
        with pytest.raises(Aborted):
            ranks[0].answer(asked[0])
        snapshot = ranks[0].answer(ranks[0].call("leave"), 5.0)
        assert snapshot.version >= 2, "the step that the host issues, and the one before it, may be open"
        ranks[1].stop()
        ranks[1] = WorkerProcess()
        start_run(ranks, plan)
        losses, state = losses_and_state(ranks, call_all(ranks, "run", 0, 6), 0)
        call_all(ranks, "close")
    assert losses == expected[0]
    assert all(torch.equal(state[key], value) for key, value in expected[1].items())


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_whose_graphs_have_kernels_of_nccl_is_freed(workers, corpus, fault):
    """NCCL aborts no communicator before graphs with its kernels are freed."""
    plan = on_gpu(plan_of("1f1b", 1, 1, 2, corpus, tp=2, model=WIDE), "nccl", "bfloat16")
    with ranks_of(workers, 2) as ranks:
        start_run(ranks, replace(plan, cuda_graphs=True))
        asked = [rank.call("run", 0, 10_000) for rank in ranks]
        ranks[1].wait_for_step(9)
        ranks[1].signal(fault)
        time.sleep(0.3)
        for method in ("fence", "abort"):
            ranks[0].answer(ranks[0].call_now(method), 10.0)
        with pytest.raises(Aborted):
            ranks[0].answer(asked[0])
        assert ranks[0].answer(ranks[0].call("leave"), 5.0).version >= 8
        ranks[1].stop()
        ranks[1] = WorkerProcess()


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("name", "axes"),
    [
        ("1f1b", {"dp": 2, "tp": 2, "model": WIDE}),
        ("1f1b", {"dp": 2, "ep": 2, "model": WIDE_MOE}),
        ("zb-h2", {"pp": 2, "cp": 2, "model": WIDE}),
    ],
)
def test_a_run_on_two_hosts_that_loses_a_rank_ends_with_the_same_bits(workers, corpus, name, axes):
    plan = plan_of(**{"name": name, "dp": 1, "pp": 1, "microbatches": 8, "data": corpus, "dtype": "float32", **axes})
    check_recovery(workers, on_gpu(plan, hosts=hosts_of_size(plan.mesh, 2)), STEPS, signal.SIGKILL)


@pytest.mark.parametrize("post_validation", [False, True])
@pytest.mark.parametrize("hosts", [(), (0, 1)])
def test_a_rank_that_an_abort_of_others_releases_commits_nothing(workers, corpus, post_validation, hosts):
    """Its GPU then computes with what its buffers happen to hold, and NORM may still complete. Ranks of other hosts,
    which are fenced later, commit nothing of that either."""
    given = {"microbatches": 1, "post_validation": post_validation}
    plan = on_gpu(plan_of("1f1b", 2, 1, data=corpus, dtype="float32", **given), hosts=hosts)
    with ranks_of(workers, 2) as ranks:
        start_run(ranks, plan)
        call_all(ranks, "run", 0, 2)
        ranks[1].answer(ranks[1].call("wait_until_released"))
        for rank in ranks:
            rank.call("run", 2, 1)
        time.sleep(0.5)
        assert [rank.answer(rank.call_now("step")) for rank in ranks] == [2, 2]
        for rank in reversed(ranks) if hosts else ranks:  # the second one a second later
            rank.answer(rank.call_now("fence"))
            time.sleep(1)
        aborts = [(rank, rank.call_now("abort")) for rank in ranks]
        for rank, number in aborts:
            rank.answer(number)
        assert [snapshot.version for snapshot in call_all(ranks, "leave")] == [2, 2]
