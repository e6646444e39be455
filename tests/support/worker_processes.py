"""Rank processes with a control thread, like the driver's workers: they can be fenced, killed and replaced."""

from __future__ import annotations

import faulthandler
import os
import queue
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import injections
import pytest
import torch
from bit_flips import flip
from fleet import state_by_name
from gpus import RANKS_A_GPU, gpu_of
from host_copies import copy_on_cpus
from pool import process_context, send

from pentad.orchestrator.recovery.fence import sources
from pentad.orchestrator.run.measure import mean_loss
from pentad.schedules.spec.plan import Plan
from pentad.workers.abort import Aborted
from pentad.workers.replication.source import CopySource

TIMEOUT = 60.0 * RANKS_A_GPU  # seconds; the first step of a run compiles kernels
NUM_CALLS = 4  # number of calls over which `check_recovery` divides its steps


class WorkerProcess:
    """One rank. `call` queues a method of its Runner; `call_now` calls it at once, on the control thread, and
    `call_beside` on a thread of its own."""

    def __init__(self) -> None:
        context = process_context()
        self.end, remote_end = context.Pipe()
        self.stacks = Path(tempfile.mkdtemp(), "stacks")  # of its threads, should it hang
        self.stacks.touch()
        self.process = context.Process(target=_serve, args=(remote_end, self.stacks), daemon=True)
        self.process.start()
        remote_end.close()
        self.num_calls, self.answers = 0, dict[int, Any]()

    def call(self, method: str, *arguments: Any) -> int:
        """Queues a call; returns the number to pass to `answer`."""
        return self._send("call", method, *arguments)

    def call_now(self, method: str, *arguments: Any) -> int:
        return self._send("now", method, *arguments)

    def call_beside(self, method: str, *arguments: Any) -> int:
        return self._send("beside", method, *arguments)

    def answer(self, number: int, seconds: float = TIMEOUT) -> Any:
        """The result of a call; raises what the method raised."""
        while number not in self.answers:
            assert self.end.poll(seconds), f"no answer in {seconds} s\n{self.stacks.read_text()}"
            self.receive()
        value = self.answers.pop(number)
        if isinstance(value, Exception):
            raise value
        return value

    def receive(self) -> None:
        """Receives the next answer, to any call."""
        number, value = self.end.recv()
        self.answers[number] = value

    def wait_for_step(self, step: int) -> None:
        """Waits until this rank has reached a step."""
        while self.answer(self.call_now("step")) < step:
            time.sleep(0.01)

    def signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def stop(self) -> None:
        self.process.kill()  # it may have ended by itself after losing a peer
        self.process.join(10)
        self.end.close()

    def _send(self, *order: Any) -> int:
        self.num_calls += 1
        self.end.send((self.num_calls, *order))
        return self.num_calls


def call_all(workers: list[WorkerProcess], method: str, *arguments: Any, seconds: float = TIMEOUT) -> list[Any]:
    """The answers of all workers; raises the error of the first to fail, as others may be waiting for it."""
    asked = [(worker, worker.call(method, *arguments)) for worker in workers]
    deadline = time.monotonic() + seconds
    while missing := [worker for worker, number in asked if number not in worker.answers]:
        ready = wait([worker.end for worker in missing], max(0.0, deadline - time.monotonic()))
        stacks = "" if ready else "\n".join(worker.stacks.read_text() for worker in missing)
        assert ready, f"{method}: no answer of {list(map(workers.index, missing))} in {seconds} s\n{stacks}"
        for worker, number in asked:
            if worker.end in ready:
                worker.receive()
                if isinstance(worker.answers.get(number), Exception):
                    worker.answer(number)
    return [worker.answer(number) for worker, number in asked]


def start_generation(workers: list[WorkerProcess], plan: Plan, generation: int, copy: CopySource | None = None) -> None:
    """Makes and connects runners. After generation 1 they take over the state of the previous ones, or begin to read
    this copy."""
    made = [worker.call("make", plan, rank, generation) for rank, worker in enumerate(workers)]
    for worker, number in zip(workers, made, strict=True):
        worker.answer(number)
    if copy is not None:
        call_all(workers, "begin_reading", copy)
    address = workers[0].answer(workers[0].call("serve", "127.0.0.1", 30.0))
    call_all(workers, "connect", address, 30.0)


def start_run(workers: list[WorkerProcess], plan: Plan) -> None:
    """Starts generation 1 from the initial values."""
    start_generation(workers, plan, 1)
    call_all(workers, "restore", None, 0)


def uninterrupted(workers: list[WorkerProcess], plan: Plan, steps: int) -> tuple[dict, dict]:
    """Losses and state of a run without a fault, see `losses_and_state`."""
    start_run(workers, plan)
    found = losses_and_state(workers, call_all(workers, "run", 0, steps), 0)
    call_all(workers, "close")
    return found


def without_a_driver(
    workers: list[WorkerProcess], plan: Plan, steps: int
) -> tuple[list[tuple[float, float]], dict[str, torch.Tensor]]:
    """Loss and gradient norm of each step, and the final state, of the ranks that a driver would have on Ray."""
    ranks = workers[: plan.mesh.size]
    start_run(ranks, plan)
    results = call_all(ranks, "run", 0, steps)
    _, state = losses_and_state(ranks, results, 0)
    call_all(ranks, "close")
    return [(mean_loss(step), step[0].grad_norm) for step in zip(*results, strict=True)], state


def losses_and_state(workers: list[WorkerProcess], results: list, first: int) -> tuple[dict, dict]:
    """Losses by step and microbatch, from step `first` on, and the state by name; ranks must agree on both."""
    losses: dict[int, dict] = {}
    state: dict[str, torch.Tensor] = {}
    for of_rank in results:
        for result in of_rank:
            if result.step >= first:
                losses.setdefault(result.step, {}).update(result.losses)
    for found in call_all(workers, "state"):
        for name, value in found.items():
            assert torch.equal(state.setdefault(name, value), value), name
    return losses, state


def recover(workers: list[WorkerProcess], lost: list[int], plan: Plan, generation: int) -> tuple[int, dict]:
    """Recovers as the driver does: fences the living, finds the newest version, replaces the lost, broadcasts the
    state.

    Returns the version and the living ranks' snapshots.
    """
    living = [rank for rank in range(len(workers)) if rank not in lost]
    for method in ("fence", "abort"):
        asked = {rank: workers[rank].call_now(method) for rank in living}
        for rank, number in asked.items():
            workers[rank].answer(number)
    asked = {rank: workers[rank].call("leave") for rank in living}
    snapshots = {rank: workers[rank].answer(number) for rank, number in asked.items()}
    version = max(snapshot.version for snapshot in snapshots.values())
    done = next(snapshot for snapshot in snapshots.values() if snapshot.version == version)
    for rank, snapshot in snapshots.items():
        if snapshot.version == version - 1 and snapshot.ready:
            workers[rank].answer(workers[rank].call("advance", done.norm, done.losses))
    current = [r for r, s in snapshots.items() if s.version == version or s.ready]
    for rank in lost:
        workers[rank].stop()
        workers[rank] = WorkerProcess()
    start_generation(workers, plan, generation)
    call_all(workers, "receive", sources(plan, current), version)
    return version, snapshots


def check_recovery(workers: list[WorkerProcess], plan: Plan, steps: int, fault: int | None) -> None:
    """Runs the steps once without a fault and once with a fault of rank 1, and compares all bits.

    `fault` is a signal; None: an error that the rank raises.
    """
    with ranks_of(workers, plan.mesh.size) as ranks:
        _check_recovery(ranks, plan, steps, fault)


@contextmanager
def ranks_of(workers: list[WorkerProcess], size: int) -> Iterator[list[WorkerProcess]]:
    """The first workers. If the test fails, they are replaced: they may be stuck."""
    ranks = workers[:size]
    try:
        yield ranks
    except BaseException:
        for worker in ranks:
            worker.stop()
        ranks[:] = [WorkerProcess() for _ in ranks]
        raise
    finally:
        workers[:size] = ranks


def _check_recovery(workers: list[WorkerProcess], plan: Plan, steps: int, fault: int | None) -> None:
    expected = uninterrupted(workers, plan, steps)
    start_run(workers, plan)
    part = steps // NUM_CALLS
    if fault is None:
        workers[1].answer(workers[1].call("fail_at", min(4, part - 1)))
    asked = [[worker.call("run", n * part, part, n < NUM_CALLS - 1) for n in range(NUM_CALLS)] for worker in workers]
    if fault is None:
        with pytest.raises(RuntimeError, match="closed by peer"):
            workers[1].answer(asked[1][0])
        with pytest.raises(Aborted):  # a queued call must not continue in the middle of a step
            workers[1].answer(asked[1][1])
    else:
        workers[1].wait_for_step(3)
        workers[1].signal(fault)
        time.sleep(0.3)
    version, snapshots = recover(workers, [1], plan, 2)
    assert 0 < version < steps, "the fault came too early or too late for this test"
    for rank in snapshots:
        with pytest.raises((Aborted, RuntimeError)):
            workers[rank].answer(asked[rank][-1])
    known = [list(snapshot.results) for snapshot in snapshots.values()]
    losses, state = losses_and_state(workers, known + call_all(workers, "run", version, steps - version), 0)
    call_all(workers, "close")
    assert losses == expected[0]
    assert all(torch.equal(state[key], value) for key, value in expected[1].items())


def _serve(end: Any, stacks: Path) -> None:
    torch.set_num_threads(1)
    file = os.open(stacks, os.O_WRONLY)
    from pentad.workers.replication.parts import HostCopies
    from pentad.workers.replication.transfer import CopyServer
    from pentad.workers.runtime.runner import Runner

    orders: queue.Queue = queue.Queue()
    lock, runners, copies = threading.Lock(), list[Runner](), HostCopies()
    progress = Path(tempfile.mkdtemp(), "progress")

    def reply(number: int, value: Any) -> None:
        with lock:
            send(end, (number, value))

    def execute(number: int, method: str, *arguments: Any) -> None:
        try:
            if method == "make":
                plan, rank, generation = arguments
                if plan.device == "cpu" and plan.transport == "peer":
                    copy_on_cpus()
                previous = runners[0] if runners and generation > 1 else None
                where = plan, rank, progress, generation, gpu_of(rank)
                runners[:] = [Runner(*where, previous, copies=copies)]
                reply(number, None)
            elif method == "serve_copies":
                reply(number, CopyServer(copies, "127.0.0.1", *arguments).address)
            elif method in ("held", "commit", "forget"):
                reply(number, getattr(copies, method)(*arguments))
            elif method == "progress_file":
                reply(number, progress)
            elif method in OF_RUNNER:
                reply(number, OF_RUNNER[method](runners[0], *arguments))
            else:
                reply(number, getattr(runners[0], method)(*arguments))
        except Exception as error:
            reply(number, type(error)(str(error)))

    def listen() -> None:
        while True:
            try:
                number, how, *order = end.recv()
            except (EOFError, OSError):
                os._exit(0)
            if how == "now":
                if order[0] == "fence":  # the train thread has to become free after it
                    faulthandler.dump_traceback_later(30, file=file)
                execute(number, *order)
            elif how == "beside":
                threading.Thread(target=execute, args=(number, *order), daemon=True).start()
            else:
                orders.put((number, *order))

    threading.Thread(target=listen, daemon=True).start()
    _execute_orders(orders, execute, file)


def _execute_orders(orders: queue.Queue, execute: Callable[..., None], stacks: int) -> None:
    while True:
        order = orders.get()
        if order[1] in ("leave", "serve", "connect", "receive"):
            faulthandler.dump_traceback_later(30, file=stacks)
        execute(*order)
        faulthandler.cancel_dump_traceback_later()


def _step(runner: Any) -> int:
    return runner.executor.step if runner.executor else -1


def _version(runner: Any) -> int:
    """Steps that the rank has committed."""
    return int(runner.executor.optimizer_step.version)


def _cancel(runner: Any) -> None:
    """What releasing a host's flags does first."""
    runner.executor.optimizer_step.cancel()


def _state(runner: Any) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for parameters in runner.state.parameters.values():
        found |= state_by_name(parameters)
        found |= {name: bias.cpu() for name, bias in parameters.router_bias.by_name.items()}
    return found


def _fail_at(runner: Any, step: int) -> None:
    """Makes the rank fail at the end of a step's NORM, when its part is complete and the other ranks know that."""
    optimizer_step = runner.executor.optimizer_step
    real = optimizer_step.reduce_norm

    def fail() -> None:
        if optimizer_step.is_ready:
            raise RuntimeError("Connection closed by peer")

    optimizer_step.reduce_norm = lambda number, check: real(number, fail if number == step else check)


def _wait_until_released(runner: Any) -> None:
    """Makes the rank's GPU wait for a flag that nobody writes."""
    runner.executor.transport.flags.wait(("updated", runner.rank), 2**20)


OF_RUNNER: dict[str, Callable[..., Any]] = {
    "step": _step,
    "version": _version,
    "cancel": _cancel,
    "state": _state,
    "fail_at": _fail_at,
    "flip": flip,
    "wait_until_released": _wait_until_released,
    **{function.__name__: function for function in injections.CALLS},
}
