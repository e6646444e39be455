"""Faults that a rank process of `worker_processes` inflicts on itself, at a point of the program chosen by a test."""

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

SLICE, SLACK = 2e-3, 1e-3  # seconds of a sleep, and by how much it may overshoot on an idle machine
resumed, reached = threading.Event(), threading.Event()
gpu_words = list[Tensor]()  # in pinned memory; the GPU waits for them


def hang_at(runner: Any, where: str, step: int, how: str) -> None:
    """Stops the rank in a step: before it launches its first `where`, an op like 'SEND_F'; or, if that is an axis of
    layers, in its first F between two operations on that axis.

    `how`: stops the 'process' (SIGSTOP); or only its train 'thread', while the process still answers; or its 'gpu', for
    which the host continues to issue work.
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
    """Continues the train thread, or the GPU."""
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
    signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)  # with os.kill the thread might return before it stops


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
    """Makes compute instructions take this long, by op, not counting waits inside layers or for a core: they sleep for
    the rest.

    So ranks are equally fast even if many processes share few cores. When an instruction oversleeps, the next ones
    sleep less; time during which the process is stopped (SIGSTOP) is not made up for.
    """
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
    """Seconds since its creation in which this thread ran or slept on purpose; without waits inside layers or for a
    core, and without time during which its process was stopped."""

    def __init__(self) -> None:
        self.began, self.ran = _seconds_outside_waits(), time.thread_time()

    def passed(self, slept: float = 0.0) -> float:
        return min(_seconds_outside_waits() - self.began, time.thread_time() - self.ran + slept + SLACK)


def _seconds_outside_waits() -> float:
    return time.monotonic() - host_waits.seconds - (run_delay() - host_waits.run_delay)


def slow_compute(runner: Any, factor: float) -> None:
    """Multiplies the durations of `pad_compute` by a factor from now on."""
    pads = runner.executor.pads
    pads.update({op: seconds * factor for op, seconds in pads.items()})


def slow_loader(runner: Any, seconds: float) -> None:
    """Delays every batch by so many seconds from now on."""
    prefetcher = runner.load_batch.prefetcher
    get = prefetcher.get

    def get_late(*arguments: Any) -> Any:
        time.sleep(seconds)
        return get(*arguments)

    prefetcher.get = get_late


def slow_link(runner: Any, op: str, seconds: float) -> None:
    """Delays the start of every transfer of this rank by `op`, SEND_F or SEND_B, from now on."""
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
        """Waits only for the timer: it adds the transfer's own work to the list of sends, behind this one."""
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
