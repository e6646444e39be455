"""Faults that a rank process of `worker_processes` inflicts on itself, at a place of the program of a test's choice."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from pentad.orchestrator.cluster.rank_status import streams_of
from pentad.schedules.ir.instruction import Instruction
from pentad.workers.parallel.async_ops import Task, host_waits
from pentad.workers.run_delay import run_delay
from pentad.workers.transport.stream_flags import check_driver, handle_of

SLICE, SLACK = 2e-3, 1e-3  # seconds of a sleep, and what it may take longer on an idle machine
resumed, reached = threading.Event(), threading.Event()
gpu_words = list[Tensor]()  # of pinned memory, that the GPU waits for


def hang_at(runner: Any, where: str, step: int, how: str) -> None:
    """The rank stops in a step: before it launches its first `where`, an op like 'SEND_F', or if that is an axis of the
    layers in its first F between two operations of that axis.

    `how`: the 'process' stops (SIGSTOP), or only its train 'thread', while the process still answers, or its 'gpu', for
    which the host goes on to issue.
    """
    resumed.clear()
    reached.clear()
    stop = _once({"process": _stop_process, "thread": _stop_thread, "gpu": _stop_gpu}[how])
    stream, progress = streams_of(runner.plan, runner.rank)[0], runner.progress
    if where in ("tp", "cp", "ep"):
        _after_first_wait(runner, where, step, stop)
        return
    write = progress.write

    def write_and_stop(at: int, counter: int, program: int = 0) -> None:
        write(at, counter, program)
        if at == step and counter >= 0 and stream[counter].parts[0].op.value == where:
            stop()

    progress.write = write_and_stop


def resume(runner: Any) -> None:
    """The train thread continues, or the GPU."""
    resumed.set()
    for word in gpu_words:
        word.fill_(1)


def has_stopped(runner: Any) -> bool:
    return reached.is_set()


def _after_first_wait(runner: Any, axis: str, step: int, stop: Callable[[], None]) -> None:
    log, last = host_waits.log, [""]
    assert log is not None

    def begin_wait(of: str) -> None:
        last[0] = of
        log.begin_wait(of)

    def end_wait() -> None:
        log.end_wait()
        if last[0] == axis and runner.executor.step == step:
            stop()

    host_waits.log = SimpleNamespace(begin_wait=begin_wait, end_wait=end_wait)


def _once(function: Callable[[], None]) -> Callable[[], None]:
    called: list[bool] = []

    def call() -> None:
        if not called:
            called.append(True)
            function()

    return call


def _stop_process() -> None:
    signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)  # from os.kill the thread might return before it stops


def _stop_thread() -> None:
    reached.set()
    resumed.wait()


def _stop_gpu() -> None:
    from cuda.bindings import driver

    word = torch.zeros(1, dtype=torch.int32).pin_memory()
    at_least = driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ
    check_driver(driver.cuStreamWaitValue32(handle_of(None), word.data_ptr(), 1, at_least))
    gpu_words.append(word)
    reached.set()


def pad_compute(runner: Any, seconds: dict[str, float]) -> None:
    """Compute instructions take so long, by op, without what they wait for inside layers and for a core: they sleep for
    the rest.

    So ranks are equally fast, even where many processes share few cores. What an instruction sleeps too long the next
    ones take less; the time that a process is stopped (SIGSTOP) is not made up for."""
    executor, pads, late = runner.executor, dict(seconds), [0.0]
    real = executor._execute

    def execute(part: Instruction) -> Task[None]:
        if part.op.value not in pads:
            yield from real(part)
            return
        clock = RunningClock()
        yield from real(part)
        left = pads[part.op.value] - late[0] - clock.passed()
        while left > 0:
            clock, slept = RunningClock(), min(left, SLICE)
            time.sleep(slept)
            left -= clock.passed(slept)
        late[0] = -left

    executor._execute, executor.pads = execute, pads


class RunningClock:
    """Seconds since it was made in which this thread ran, or slept on purpose: those in which it waited inside layers
    or for a core, or its process was stopped, are left out."""

    def __init__(self) -> None:
        self.began, self.ran = _seconds_outside_waits(), time.thread_time()

    def passed(self, slept: float = 0.0) -> float:
        return min(_seconds_outside_waits() - self.began, time.thread_time() - self.ran + slept + SLACK)


def _seconds_outside_waits() -> float:
    return time.monotonic() - host_waits.seconds - (run_delay() - host_waits.run_delay)


def slow_compute(runner: Any, factor: float) -> None:
    """What `pad_compute` adds is that many times as long from now on."""
    pads = runner.executor.pads
    pads.update({op: seconds * factor for op, seconds in pads.items()})


def slow_loader(runner: Any, seconds: float) -> None:
    """Every batch comes so much later from now on."""
    prefetcher = runner.load_batch.prefetcher
    get = prefetcher.get

    def get_late(*arguments: Any) -> Any:
        time.sleep(seconds)
        return get(*arguments)

    prefetcher.get = get_late


def slow_link(runner: Any, op: str, seconds: float) -> None:
    """Every transfer of this rank by SEND_F or SEND_B begins so much later from now on."""
    transport = runner.executor.transport
    send = transport.send

    def send_late(part: Instruction, tensor: Tensor) -> None:
        if part.op.value == op:
            transport.sends.append((_LateSend(seconds, partial(send, part, tensor)), tensor))
        else:
            send(part, tensor)

    transport.send = send_late


class _LateSend:
    """The work of a transfer that a timer starts."""

    def __init__(self, seconds: float, send: Callable[[], None]) -> None:
        self.timer = threading.Timer(seconds, send)
        self.timer.start()

    def wait(self) -> None:
        """The transfer's own work follows in the list of sends, as the timer has added it."""
        self.timer.join()


CALLS: tuple[Callable[..., Any], ...] = (
    hang_at,
    resume,
    has_stopped,
    pad_compute,
    slow_compute,
    slow_loader,
    slow_link,
)
