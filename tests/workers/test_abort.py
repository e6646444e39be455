"""A rank that loses its partners keeps its process and its weights, and continues with others to the same bits."""

from __future__ import annotations

import random
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from bits import same_bits
from custom_models import custom_model
from fp8_plans import BLOCK, ZERO_3, fp8_plan
from plans import plan_of
from resume import commit
from small_models import FAMILIES, MOE
from worker_processes import WorkerProcess, call_all, check_recovery, ranks_of, start_generation, start_run

from pentad.orchestrator.activations.offloaded_tensors import with_slots
from pentad.schedules.ir.instruction import Op
from pentad.schedules.spec.plan import Plan
from pentad.workers import abort
from pentad.workers.abort import AbandonableThread, Aborted, Fence, SocketRegistry, listening_ports
from pentad.workers.checkpoint import checkpoint
from pentad.workers.rank_waits import rank_waits
from pentad.workers.runtime.runner import Runner

pytestmark = pytest.mark.timeout(150)
slow = pytest.mark.slow
SQUARE: dict[str, Any] = {"dp": 2, "pp": 2, "microbatches": 4}
PIPELINE: dict[str, Any] = {"pp": 4, "microbatches": 8}
ON_HOST: dict[str, Any] = {"host_optimizer": True, "unit_layers": 1, "offload": 0.5}
STEPS = 16
LONG = 2**28  # elements, few of which are sent in a fraction of a second


def make_plan(name: str, corpus: str, axes: dict[str, Any]) -> Plan:
    optimizer, narrow = axes.get("optimizer", "adamw"), axes.get("bf16_reduce", False)
    sizes = {key: value for key, value in axes.items() if key not in ("optimizer", "bf16_reduce")}
    plan = plan_of(**{"name": name, "dp": 1, "pp": 1, "data": corpus, "dtype": "float32", **sizes})
    return with_slots(replace(plan, optimizer=replace(plan.optimizer, name=optimizer), bf16_reduce=narrow))


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("name", "axes"),
    [
        pytest.param("1f1b", {"pp": 2, "microbatches": 4}, marks=slow),
        ("1f1b", SQUARE),
        pytest.param("zb-h2", SQUARE, marks=slow),
        pytest.param("dualpipe", PIPELINE, marks=slow),
        pytest.param("zb-v", {"pp": 2, "tp": 2, "microbatches": 4}, marks=slow),
        ("1f1b", {"dp": 2, "ep": 2, "microbatches": 2, "model": MOE}),
        pytest.param("1f1b", {"pp": 2, "cp": 2, "microbatches": 2, "model": FAMILIES["qwen3"]}, marks=slow),
        pytest.param("1f1b", {**SQUARE, "optimizer": "muon"}, marks=slow),
    ],
)
def test_a_call_queued_behind_a_failed_one_does_nothing(workers, corpus, name, axes):
    """The driver queues calls. Gradients that lack only their norm stay complete until the rank receives it."""
    plan, failed_step = make_plan(name, corpus, axes), 2
    ranks = workers[: plan.mesh.size]
    start_run(ranks, plan)
    call_all(ranks, "run", 0, failed_step + 1)
    expected = call_all(ranks, "state")
    call_all(ranks, "close")

    start_run(ranks, plan)
    ranks[1].answer(ranks[1].call("fail_at", failed_step))
    asked = [[worker.call("run", first, 4) for first in (0, 4)] for worker in ranks]
    with pytest.raises(RuntimeError, match="closed by peer"):
        ranks[1].answer(asked[1][0])
    with pytest.raises(Aborted):  # the others are in the next step already, and would take part in it
        ranks[1].answer(asked[1][1])
    for worker in (ranks[0], *ranks[2:]):
        worker.wait_for_step(failed_step + 1)
    for worker in ranks:
        worker.answer(worker.call_now("fence"))
    snapshots = call_all(ranks, "leave")
    versions = {rank: (each.version, each.ready) for rank, each in enumerate(snapshots)}
    assert versions == {**dict.fromkeys(range(len(ranks)), (failed_step + 1, False)), 1: (failed_step, True)}
    ranks[1].answer(ranks[1].call("advance", snapshots[0].norm, snapshots[0].losses))
    for found, state in zip(call_all(ranks, "state"), expected, strict=True):
        assert same_bits(found, state)


@pytest.mark.slow
@pytest.mark.parametrize("in_8_bits", [False, True])
def test_a_lost_zero_shard_comes_back_from_a_checkpoint(workers, corpus, tmp_path, in_8_bits):
    """The survivors keep their processes, but their shards are not enough. Weights in 8 bits are cast again."""
    given: dict[str, Any] = {"dp": 2, "pp": 2, "dtype": "float32", **ZERO_3}
    spec = replace(BLOCK, gathers=True)
    plan = fp8_plan(spec, "1f1b", given, corpus) if in_8_bits else plan_of("1f1b", microbatches=4, data=corpus, **given)
    start_run(workers, plan)
    call_all(workers, "run", 0, 6)
    expected = call_all(workers, "state")
    call_all(workers, "close")

    folder = checkpoint.folder_of(tmp_path, 2)
    start_run(workers, plan)
    call_all(workers, "run", 0, 2)
    commit(folder, 2, [shard for shards in call_all(workers, "save", str(folder), 2) for shard in shards])
    asked = [worker.call("run", 2, 80) for worker in workers]
    workers[1].wait_for_step(4)
    workers[1].signal(signal.SIGKILL)
    for rank in (0, 2, 3):
        workers[rank].answer(workers[rank].call_now("fence"))
        with pytest.raises((Aborted, RuntimeError)):
            workers[rank].answer(asked[rank])
        workers[rank].answer(workers[rank].call("leave"))
    workers[1].stop()
    workers[1] = WorkerProcess()
    start_generation(workers, plan, 2)
    call_all(workers, "restore", str(folder), 2)
    call_all(workers, "run", 2, 4)
    for found, state in zip(call_all(workers, "state"), expected, strict=True):
        assert same_bits(found, state)
    call_all(workers, "close")


def test_a_runner_whose_generation_ended_early_passes_its_state_on(corpus, tmp_path):
    """A generation may end before its runner has been made; the next one takes over from the same rank."""
    first = Runner(make_plan("1f1b", corpus, {"microbatches": 2, "model": MOE}), 0, tmp_path / "progress")
    first.restore(None, 3)
    state = {
        share: [torch.rand_like(tensor) for tensor in parameters.state_tensors()]
        for share, parameters in first.state.parameters.items()
    }
    for share, tensors in state.items():
        for own, tensor in zip(first.state.parameters[share].state_tensors(), tensors, strict=True):
            own.copy_(tensor)
    for generation in (2, 3):
        last = Runner(first.plan, 0, tmp_path / "progress", generation, previous=first)
    assert last.state.version == 3
    balancer: Any = last.stages[0].load_balancer
    assert balancer.bias.all()
    for share, tensors in state.items():
        found = last.state.parameters[share].state_tensors()
        assert all(torch.equal(*pair) for pair in zip(found, tensors, strict=True))


def test_results_that_a_dead_driver_has_not_recorded_outlive_a_generation(corpus, tmp_path):
    """The next driver may die, too, between its fence and its record."""
    first = Runner(make_plan("1f1b", corpus, {"microbatches": 2}), 0, tmp_path / "progress")
    first.connect(first.serve("127.0.0.1", 30.0), 30.0)
    first.restore(None, 0)
    first.run(0, 1)
    first.run(1, 2, more=True)  # step 2 stays open, and its result unreported
    first.fence()
    snapshot = first.leave()
    second = Runner(first.plan, 0, tmp_path / "progress", 2, previous=first)
    assert [result.step for result in snapshot.results] == list(range(snapshot.version))
    assert second.leave() == replace(snapshot, norm=0.0, losses=())
    blank = Runner(first.plan, 0, tmp_path / "progress", 3)
    assert not blank.leave().results


def test_a_blank_rank_that_has_received_nothing_is_not_ready(corpus, tmp_path):
    runner = Runner(make_plan("1f1b", corpus, {"microbatches": 2}), 0, tmp_path / "progress", 2)
    runner.connect(runner.serve("127.0.0.1", 30.0), 30.0)
    runner.fence()
    snapshot = runner.leave()
    assert (snapshot.version, snapshot.ready) == (-1, False)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_step_aborted_at_its_norm_can_still_be_committed(corpus, tmp_path, optimizer):
    """A GPU behind its host still runs NORM, STEP and a forward of the next step after the generation has ended. Its
    partners may have received the norm and committed the step."""
    runners = []
    for number in (0, 1):
        plan = make_plan("1f1b", corpus, {"microbatches": 2, "model": MOE, "optimizer": optimizer})
        runners.append(Runner(plan, 0, tmp_path / str(number)))
        runners[-1].connect(runners[-1].serve("127.0.0.1", 30.0), 30.0)
        runners[-1].restore(None)
        *_, newest = runners[-1].run(0, 3 - number)
        if number == 0:
            norm = newest.grad_norm
            runners[-1].close()
    late = runners[-1]
    executor: Any = late.executor
    optimizer_step = executor.optimizer_step
    real = optimizer_step.reduce_norm
    optimizer_step.reduce_norm = lambda step, _: real(step, lambda: optimizer_step.is_ready and optimizer_step.cancel())
    (program,) = late.programs
    executor.run(program, 2, late.load_batch(2))
    first = replace(program, stream=program.stream[:1])
    assert first.stream[0].parts[0].op is Op.F
    executor.run(first, 3, late.load_batch(3))
    snapshot = late.leave()
    assert (snapshot.version, snapshot.ready, snapshot.norm) == (2, True, newest.grad_norm)
    late.advance(norm, ())
    states = [
        [tensor for parameters in runner.state.parameters.values() for tensor in parameters.state_tensors()]
        for runner in runners
    ]
    assert all(torch.equal(*pair) for pair in zip(*states, strict=True))


@slow  # by default test_elastic.py kills and stops ranks
@pytest.mark.parametrize(
    ("fault", "name", "axes"),
    [
        (signal.SIGKILL, "dualpipe", PIPELINE),
        (signal.SIGSTOP, "zb-h2", SQUARE),
        (signal.SIGKILL, "zb-h2", SQUARE),
        (signal.SIGSTOP, "dualpipe", PIPELINE),
        (signal.SIGKILL, "1f1b", SQUARE),
        (signal.SIGSTOP, "1f1b", SQUARE),
        (None, "1f1b", SQUARE),
        (signal.SIGKILL, "zb-h2", {**SQUARE, "optimizer": "muon"}),
        (signal.SIGSTOP, "dualpipe", {**PIPELINE, "bf16_reduce": True}),
        (signal.SIGKILL, "1f1b", {**SQUARE, "bf16_reduce": True}),
        (signal.SIGKILL, "zb-h2", {**SQUARE, **ON_HOST}),
        (signal.SIGSTOP, "1f1b", {**SQUARE, **ON_HOST}),
    ],
)
def test_a_run_that_loses_a_rank_ends_with_the_same_bits(workers, corpus, name, axes, fault):
    check_recovery(workers, make_plan(name, corpus, axes), STEPS, fault)


SHARED_LAYERS = [
    ("1f1b", {"dp": 2, "ep": 2, "microbatches": 2, "model": MOE}),
    pytest.param("1f1b", {"dp": 2, "ep": 2, "microbatches": 2, "model": FAMILIES["deepseek-v3"]}, marks=slow),
    pytest.param("dualpipe", {"pp": 2, "ep": 2, "microbatches": 4, "model": MOE}, marks=slow),
    pytest.param("dualpipe", {"pp": 2, "tp": 2, "microbatches": 4}, marks=slow),
    pytest.param("zb-h2", {"dp": 2, "tp": 2, "microbatches": 2}, marks=slow),
    pytest.param("zb-v", {"pp": 2, "cp": 2, "microbatches": 4, "model": FAMILIES["qwen3"]}, marks=slow),
    pytest.param("1f1b", {"cp": 4, "microbatches": 2}, marks=slow),
    pytest.param("1f1b", {**SQUARE, "model": replace(FAMILIES["qwen3"], mtp_layers=1)}, marks=slow),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "axes"), SHARED_LAYERS)
def test_tensor_context_and_expert_ranks_recover(workers, corpus, name, axes):
    check_recovery(workers, make_plan(name, corpus, axes), STEPS, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "axes"), [("zb-h2", SQUARE), ("dualpipe", PIPELINE)])
def test_a_custom_model_recovers(workers, corpus, tmp_path, name, axes):
    model = custom_model(tmp_path, "gpt_dropout", layers=6)
    check_recovery(workers, make_plan(name, corpus, {**axes, "model": model}), STEPS, signal.SIGKILL)


@pytest.fixture
def thread(monkeypatch) -> AbandonableThread:
    monkeypatch.setattr(abort, "POLL_SECONDS", 0.02)
    monkeypatch.setattr(abort, "PATIENCE_SECONDS", 0.2)
    return AbandonableThread(Fence())


def soon(function: Callable[[], object]) -> None:
    threading.Timer(0.05, function).start()


def test_a_call_returns_and_raises_as_if_it_were_made_directly(thread):
    assert thread.run(lambda: 1) == 1
    with pytest.raises(TimeoutError, match="a reason"):
        thread.run(lambda: exec('raise TimeoutError("a reason")'))
    thread.close()
    assert thread.run(lambda: 2) == 2
    thread.close()


def test_a_call_that_waits_after_the_fence_is_left_behind_and_does_nothing_more(thread):
    released, done, ended = threading.Event(), list[str](), threading.Event()

    def call() -> None:
        try:
            with thread.waiting():
                released.wait(60)
            done.append("on")
        except Aborted:
            done.append("aborted")
        ended.set()

    soon(thread.fence.set)
    with pytest.raises(Aborted):
        thread.run(call)
    assert not done
    with pytest.raises(Aborted):  # a queued call does not wait for that one
        thread.run(call)
    released.set()
    assert ended.wait(60)
    assert done == ["aborted"]


def test_a_call_that_computes_after_the_fence_is_not_left_behind(thread):
    """It changes what the caller would read."""

    def call() -> str:
        with thread.waiting():
            pass
        thread.fence.set()
        time.sleep(3 * abort.PATIENCE_SECONDS)
        return "done"

    assert thread.run(call) == "done"


def test_a_fence_leaves_a_wait_for_a_long_message_behind(thread):
    """gloo does not wake a thread whose message is partly written when the connection closes."""
    store, groups, sockets = dist.HashStore(), dict[int, Any](), SocketRegistry(1)

    def connect(rank: int) -> None:
        groups[rank] = dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=8))

    ranks = [threading.Thread(target=connect, args=(rank,)) for rank in (0, 1)]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join()

    def call() -> None:
        works = [groups[1].recv([torch.empty(LONG)], 0, 0), groups[0].send([torch.empty(LONG)], 1, 0)]
        assert sockets.shutdown() in {1, 2}  # gloo may close the second end itself, once the first is shut down
        thread.fence.set()
        for work in works:
            with thread.waiting(), suppress(RuntimeError):
                work.wait()

    began = time.monotonic()
    with pytest.raises(Aborted):
        thread.run(call)
    assert time.monotonic() - began < 4


def test_a_rank_that_waits_for_ever_answers_after_the_fence(thread, corpus, tmp_path):
    runner = Runner(make_plan("1f1b", corpus, {"microbatches": 2}), 0, tmp_path / "progress")
    runner.connect(runner.serve("127.0.0.1", 30.0), 30.0)
    runner.restore(None)
    executor: Any = runner.executor
    run, released = executor.run, threading.Event()

    def run_and_wait(program: Any, step: int, batch: Any) -> None:
        run(program, step, batch)
        if step == 2:
            soon(runner.fence)
            with rank_waits.abandonable():
                released.wait(60)

    executor.run = run_and_wait
    with pytest.raises(Aborted):
        runner.run(0, 4, more=True)
    assert runner.leave().version == 3
    assert not dist.is_initialized()
    released.set()


@slow
@pytest.mark.parametrize("axes", [{"dp": 2, "tp": 2, "microbatches": 2}, SQUARE])
def test_ranks_answer_whenever_another_one_dies(workers, corpus, axes):
    plan, times = make_plan("1f1b", corpus, axes), random.Random(1)
    with ranks_of(workers, plan.mesh.size) as ranks:
        for _ in range(10):
            start_run(ranks, plan)
            living, asked = (ranks[0], *ranks[2:]), [worker.call("run", 0, 80) for worker in ranks]
            ranks[1].wait_for_step(0)
            time.sleep(times.random())
            ranks[1].signal(signal.SIGKILL)
            for worker in living:
                worker.answer(worker.call_now("fence"))
            left = [(worker, worker.call("leave")) for worker in living]
            assert all(worker.answer(number, 10).version >= 0 for worker, number in left)
            for worker, number in zip(living, [asked[0], *asked[2:]], strict=True):
                with pytest.raises((Aborted, RuntimeError)):
                    worker.answer(number)
            ranks[1].stop()
            ranks[1] = WorkerProcess()


def test_a_fence_ends_every_read_and_fails_no_write():
    """A send of gloo that fails while the fence shuts connections down is never woken."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        registry = SocketRegistry(server.getsockname()[1])
        with socket.create_connection(server.getsockname()) as near, server.accept()[0] as far:
            assert registry.shutdown() == 2
            near.settimeout(10)
            far.settimeout(10)
            assert (near.recv(1), far.recv(1)) == (b"", b"")
            assert (near.send(b"x"), far.send(b"x")) == (1, 1)


def test_the_ports_of_a_process_are_those_it_listens_on():
    before = listening_ports()
    with socket.create_server(("127.0.0.1", 0)) as first, socket.socketpair()[0], open("/dev/null") as _:
        with socket.create_connection(first.getsockname()), socket.create_server(("127.0.0.1", 0)) as second:
            assert listening_ports() - before == {first.getsockname()[1], second.getsockname()[1]}
        assert listening_ports() - before == {first.getsockname()[1]}
    assert listening_ports() == before
