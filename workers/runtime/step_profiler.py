"""Runs chosen steps under torch's profiler."""

from __future__ import annotations

import threading
import time
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch.autograd import DeviceType

from pentad.schedules.ir.instruction import Action
from pentad.schedules.simulate.step_profile import (
    ASYNC,
    INSTRUCTION,
    KERNEL,
    OPERATOR,
    ProfileEvent,
    RankProfile,
    longest,
    pack,
)
from pentad.workers.data.batch_loader import Batch
from pentad.workers.runtime.executor import Executor, RunAction
from pentad.workers.runtime.rank_program import RankProgram

MOST_EVENTS = 100_000  # of a rank and step: less than 1 MB, and some seconds of the host
MOST_NAME = 200  # characters of a kernel's name
MARK = "pentad instruction "  # what the profiler's names of instructions begin with
CUDA_CALLS = ("cuda", "cuLaunch", "cuMem", "cuStream", "cuEvent", "cuGraph")  # of the runtime, and of the driver
NO_KERNELS = "torch's profiler saw no kernels: CUPTI is missing, or another profiler uses it"
_in_use = threading.Lock()  # a process has one profiler, which a thread that was left behind may still hold


class StepProfiler:
    """Profiles the steps of a rank that are in `steps`; `take` has their profiles.

    The profiler only observes: it changes no bit, and a step runs without it where it does not start.
    """

    def __init__(self, steps: Sequence[int], device: torch.device) -> None:
        self.steps, self.device = frozenset(steps), device
        self.profiles = dict[int, RankProfile]()

    def run(self, executor: Executor, program: RankProgram, step: int, batch: Batch) -> None:
        """Has the executor issue a step; one that is profiled is also complete afterwards. Raises Aborted if the
        generation ends."""
        if step not in self.steps:
            executor.run(program, step, batch)
            return
        executor.lanes.finish(executor.check)  # the kernels of earlier steps
        try:
            recording = _Recording(self.device)
        except Exception as error:
            self.profiles[step] = RankProfile(problem=_sentence(error))
            executor.run(program, step, batch)
            return
        try:
            executor.run(program, step, batch, recording.marked)
            executor.lanes.finish(executor.check)
        except BaseException:
            recording.discard()
            raise
        try:
            self.profiles[step] = recording.profile()
        except Exception as error:
            self.profiles[step] = RankProfile(problem=_sentence(error))

    def take(self, step: int) -> RankProfile | None:
        """That of a step whose results are read; None if it was not chosen."""
        return self.profiles.pop(step, None)


class _Recording:
    """A profiler that runs until `profile` or `discard`, with the time on the monotonic clock at which the host began
    each instruction."""

    def __init__(self, device: torch.device) -> None:
        """Raises RuntimeError if the process has a profiler already, and whatever torch does if it cannot start."""
        if not _in_use.acquire(blocking=False):
            raise RuntimeError("a profiler of an earlier generation is still running")
        try:
            from torch.autograd.profiler import profile  # that of torch.profiler imports torch's compiler

            self.on_gpu, self.marks = device.type == "cuda", list[tuple[Action, int]]()
            self.profiler: Any = profile(use_device="cuda" if self.on_gpu else None, use_kineto=True)
            self.profiler.__enter__()
        except BaseException:
            _in_use.release()
            raise

    def marked(self, run_action: RunAction) -> RunAction:
        """The same, within a mark that bears the action's name."""
        from torch.autograd.profiler import record_function

        def run(action: Action) -> None:
            self.marks.append((action, time.monotonic_ns()))
            with record_function(MARK + _text(action)):
                run_action(action)

        return run

    def profile(self) -> RankProfile:
        """The events of a step that is complete. Raises RuntimeError without the marks of its instructions."""
        try:
            self.profiler.__exit__(None, None, None)
            events = list(_events(self.profiler.kineto_results.events(), self.marks))
        finally:
            _in_use.release()
        kept = longest(events, MOST_EVENTS)
        lacks_kernels = self.on_gpu and not any(event.kind == KERNEL for event in events)
        return RankProfile(pack(kept), len(events) - len(kept), NO_KERNELS if lacks_kernels else "")

    def discard(self) -> None:
        """Ends it without waiting for the GPU, which may never complete what a lost rank has left."""
        try:
            with suppress(Exception):
                self.profiler.use_device = None  # it would call its `synchronize`
                self.profiler.__exit__(None, None, None)
        finally:
            _in_use.release()


def _text(action: Action) -> str:
    """'1F4', or '1F4+2BW0' of an overlapped pair."""
    return "+".join(str(part.key) for part in action.parts)


def _events(found: Sequence[Any], marks: Sequence[tuple[Action, int]]) -> Iterator[ProfileEvent]:
    """The profiler's events on the monotonic clock, each with the instruction within which the host issued it.

    Every mark is a reading of both clocks, but late on the profiler's by what it takes to begin one: the least
    difference is the difference of the clocks. Kernels are found by what launched them: a call of the CUDA runtime, or
    else an operator. A graph's kernels are those of the instruction that launched it.
    """
    known = [(event, kind, event.name()) for event in found if (kind := _kind(event))]
    begun = sorted((event for event, _, name in known if name.startswith(MARK)), key=lambda event: event.start_ns())
    if not begun or [event.name() for event in begun] != [MARK + _text(action) for action, _ in marks]:
        raise RuntimeError(f"torch's profiler saw {len(begun)} of {len(marks)} instructions")
    offset = min(event.start_ns() - at for event, (_, at) in zip(begun, marks, strict=True))
    starts, ends = [event.start_ns() for event in begun], [event.end_ns() for event in begun]
    names = [(_text(action), "+".join(part.op.value for part in action.parts)) for action, _ in marks]
    operators, calls = dict[int, int](), dict[int, int]()  # starts by correlation, of what launches kernels
    for event, kind, name in known:
        if kind == OPERATOR:
            (calls if name.startswith(CUDA_CALLS) else operators)[event.correlation_id()] = event.start_ns()
    for event, kind, name in known:
        issued = start = event.start_ns()
        if kind == KERNEL:
            by_operator = operators.get(event.linked_correlation_id(), -1)
            issued = calls.get(event.correlation_id(), by_operator)
        elif name.startswith(MARK):
            kind, name = INSTRUCTION, name.removeprefix(MARK)
        elif event.is_async():
            kind = ASYNC
        at = bisect_right(starts, issued) - 1
        where = names[at] if at >= 0 and issued < ends[at] else ("", "")
        placed = event.device_resource_id(), start - offset, event.duration_ns()
        yield ProfileEvent(kind, name[:MOST_NAME], *where, *placed)


def _kind(event: Any) -> str | None:
    """None for a mark in the timeline of a GPU, which spans the kernels of an instruction. torch 2.11 does not tell the
    type of an activity."""
    if event.device_type() == DeviceType.CPU:
        return OPERATOR
    return None if event.is_user_annotation() or event.name().startswith(MARK) else KERNEL


def _sentence(error: Exception) -> str:
    return " ".join(str(error).split())[:MOST_NAME] or type(error).__name__
