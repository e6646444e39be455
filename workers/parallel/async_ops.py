"""Asynchronous communication: handles of operations in flight, and tasks that yield while they wait for one.

DualPipe (arXiv 2412.19437, section 3.2.1) overlaps a forward and a backward: each computes while the other
communicates. Where a task yields depends on the program and on shapes, never on time, so that all ranks of a group
start their operations in the same order.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from pentad.workers.rank_waits import rank_waits

S = TypeVar("S")
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
Task = Generator[None, None, T]  # yields after starting communication, returns its result

# torch 2.13 renames all_gather_into_tensor and reduce_scatter_tensor.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_reduce_max_(tensors: Sequence[Tensor], group: dist.ProcessGroup | None) -> None:
    """Replaces the elements of all tensors by their maxima over the ranks of a group (None: one rank), in one
    operation."""
    if group is None or not tensors:
        return
    found = torch.cat([each.flatten() for each in tensors])
    with rank_waits.abandonable():
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=group)
    for each, maxima in zip(tensors, found.split([each.numel() for each in tensors]), strict=True):
        each.copy_(maxima.view(each.shape))


class Arrival(Protocol):
    """Something in flight, such as `dist.Work`; `wait` makes the host, or the current stream of a GPU, wait for it."""

    def wait(self) -> object: ...


class Works(NamedTuple):
    """Parts of one operation: a rank that waits for a later part counts as no further along than one at the first."""

    works: Sequence[Arrival | None]

    def wait(self) -> None:
        for work in self.works:
            if work is not None:
                work.wait()


class ContinuedWork(NamedTuple):
    """An operation in flight, and what a host that has waited for it does next, unless an abort has left it behind.
    `keep_alive` is in use until then."""

    work: Arrival
    follow: Callable[[], object]
    keep_alive: Tensor

    def wait(self) -> None:
        self.work.wait()


class LayerWork(NamedTuple):
    """An operation in flight inside a layer; the description of its group names the mesh axis."""

    work: Arrival | None  # torch returns None to a rank outside the group
    group: dist.ProcessGroup


class WaitLog(Protocol):
    """Records waits for operations inside layers, so that others can see one while it lasts."""

    def begin_wait(self, axis: str) -> None: ...

    def end_wait(self) -> None: ...


class HostWaits:
    """How long this process's host has waited for operations inside layers so far; on a GPU it does not wait. Each wait
    is recorded in `log`, if there is one. `run_delay` is the part of that time in which the thread was ready to run, by
    the clock `delay_clock`."""

    seconds = 0.0
    run_delay = 0.0
    log: WaitLog | None = None
    delay_clock: Callable[[], float] = staticmethod(lambda: 0.0)

    def wait(self, works: Sequence[LayerWork]) -> None:
        if not works:
            return
        began, delayed = time.monotonic(), self.delay_clock()
        for work, group in works:
            if work is None:
                continue
            if self.log is not None:
                self.log.begin_wait(group.group_desc)
            with rank_waits.abandonable():
                work.wait()
            if self.log is not None:
                self.log.end_wait()
        self.seconds += time.monotonic() - began
        self.run_delay += self.delay_clock() - delayed


host_waits = HostWaits()


class AsyncResult(Generic[T_co]):
    """The result of operations in flight.

    In a task, `yield from result` yields once if operations are in flight, then waits; on a GPU the current stream
    waits, not the host. `result` makes the value once `works` are done; `keep_alive` are buffers in use until then.
    """

    def __init__(self, works: Sequence[LayerWork], result: Callable[[], T_co], *keep_alive: object) -> None:
        self.works, self.result, self.keep_alive = works, result, keep_alive

    def __iter__(self) -> Task[T_co]:
        if self.works:
            yield
        return self.wait()

    def then(self, function: Callable[[T_co], S]) -> AsyncResult[S]:
        """Applies `function` to the result."""
        return AsyncResult(self.works, lambda: function(self.result()), self.keep_alive)

    def wait(self) -> T_co:
        """Waits without yielding."""
        host_waits.wait(self.works)
        return self.result()


def ready(value: T) -> AsyncResult[T]:
    """A value that needs no communication."""
    return AsyncResult((), lambda: value)


def gather2(first: AsyncResult[S], second: AsyncResult[T]) -> AsyncResult[tuple[S, T]]:
    """Both results, with one yield."""
    works = (*first.works, *second.works)
    return AsyncResult(works, lambda: (first.result(), second.result()), first.keep_alive, second.keep_alive)


def all_gather_rows(x: Tensor, group: dist.ProcessGroup) -> AsyncResult[Tensor]:
    """The rows of all ranks of the group in order, [size T, ...] from [T, ...]."""
    full, x = x.new_empty(group.size() * x.shape[0], *x.shape[1:]), x.contiguous()
    return AsyncResult((LayerWork(all_gather(full, x, group=group, async_op=True), group),), lambda: full, x)


def reduce_scatter_rows(x: Tensor, group: dist.ProcessGroup) -> AsyncResult[Tensor]:
    """This rank's rows [T, ...] of the sum over the group of [size T, ...]: the transpose of `all_gather_rows`."""
    own, x = x.new_empty(x.shape[0] // group.size(), *x.shape[1:]), x.contiguous()
    return AsyncResult((LayerWork(reduce_scatter(own, x, group=group, async_op=True), group),), lambda: own, x)


def run_to_completion(task: Task[T]) -> T:
    """Runs a task by itself."""
    while True:
        try:
            next(task)
        except StopIteration as end:
            return end.value


def on_yield(task: Task[T], callback: Callable[[], None]) -> Task[T]:
    """Calls `callback` before each yield of the task and at its end."""
    while True:
        try:
            next(task)
        except StopIteration as end:
            callback()
            return end.value
        callback()
        yield


def interleave(*tasks: Task[None]) -> None:
    """Runs tasks round-robin, each up to its next yield, until all have ended."""
    running = list(tasks)
    try:
        while running:
            running = [task for task in running if next(task, "ended") is None]
    finally:
        for task in tasks:
            task.close()
