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

MOST_EVENTS = 100_000  # per rank and step: less than 1 MB, and some seconds of the host
MOST_NAME = 200  # characters of a kernel's name
MARK = "pentad instruction "  # prefix of the profiler's names for instructions
CUDA_CALLS = ("cuda", "cuLaunch", "cuMem", "cuStream", "cuEvent", "cuGraph")  # calls of the runtime and of the driver
NO_KERNELS = "torch's profiler saw no kernels: CUPTI is missing, or another profiler uses it"
_in_use = threading.Lock()  # a process has one profiler, which an abandoned thread may still hold


class StepProfiler:
    """Profiles those steps of a rank that are in `steps`; `take` returns their profiles.

    The profiler only observes: it changes no bit, and if it does not start, the step runs without it.
    """

    def __init__(self, steps: Sequence[int], device: torch.device) -> None:
        self.steps, self.device = frozenset(steps), device
        self.profiles = dict[int, RankProfile]()

    def run(self, executor: Executor, program: RankProgram, step: int, batch: Batch) -> None:
        """Has the executor issue a step; a profiled step has also completed when this returns. Raises Aborted if the
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
        """The profile of a step whose results are being read; None if it was not chosen."""
        return self.profiles.pop(step, None)


class _Recording:
    """A profiler that runs until `profile` or `discard`, and the time on the monotonic clock at which the host began
    each instruction."""

    def __init__(self, device: torch.device) -> None:
        """Raises RuntimeError if the process already has a profiler, and whatever torch raises if it cannot start."""
        if not _in_use.acquire(blocking=False):
            raise RuntimeError("a profiler of an earlier generation is still running")
        try:
            from torch.autograd.profiler import profile  # torch.profiler's would import torch's compiler

            self.on_gpu, self.marks = device.type == "cuda", list[tuple[Action, int]]()
            self.profiler: Any = profile(use_device="cuda" if self.on_gpu else None, use_kineto=True)
            self.profiler.__enter__()
        except BaseException:
            _in_use.release()
            raise

    def marked(self, run_action: RunAction) -> RunAction:
        """`run_action` within a mark that bears the action's name."""
        from torch.autograd.profiler import record_function

        def run(action: Action) -> None:
            self.marks.append((action, time.monotonic_ns()))
            with record_function(MARK + _text(action)):
                run_action(action)

        return run

    def profile(self) -> RankProfile:
        """The events of a completed step. Raises RuntimeError if the marks of its instructions are missing."""
        try:
            self.profiler.__exit__(None, None, None)
            events = list(_events(self.profiler.kineto_results.events(), self.marks))
        finally:
            _in_use.release()
        kept = longest(events, MOST_EVENTS)
        lacks_kernels = self.on_gpu and not any(event.kind == KERNEL for event in events)
        return RankProfile(pack(kept), len(events) - len(kept), NO_KERNELS if lacks_kernels else "")

    def discard(self) -> None:
        """Ends the profiler without waiting for the GPU, which may never complete what a lost rank has left
        unfinished."""
        try:
            with suppress(Exception):
                self.profiler.use_device = None  # otherwise it would synchronize the device
                self.profiler.__exit__(None, None, None)
        finally:
            _in_use.release()


def _text(action: Action) -> str:
    """'1F4', or '1F4+2BW0' for an overlapped pair."""
    return "+".join(str(part.key) for part in action.parts)


def _events(found: Sequence[Any], marks: Sequence[tuple[Action, int]]) -> Iterator[ProfileEvent]:
    """The profiler's events on the monotonic clock, each with the instruction during which the host issued it.

    Every mark gives a reading of both clocks, the profiler's being late by the time it takes to begin the mark, so the
    smallest difference is the offset between the clocks. A kernel belongs to the call of the CUDA runtime that launched
    it or, failing that, to the operator; the kernels of a graph belong to the instruction that launched the graph.
    """
    known = [(event, kind, event.name()) for event in found if (kind := _kind(event))]
    begun = sorted((event for event, _, name in known if name.startswith(MARK)), key=lambda event: event.start_ns())
    if not begun or [event.name() for event in begun] != [MARK + _text(action) for action, _ in marks]:
        raise RuntimeError(f"torch's profiler saw {len(begun)} of {len(marks)} instructions")
    offset = min(event.start_ns() - at for event, (_, at) in zip(begun, marks, strict=True))
    starts, ends = [event.start_ns() for event in begun], [event.end_ns() for event in begun]
    names = [(_text(action), "+".join(part.op.value for part in action.parts)) for action, _ in marks]
    operators, calls = dict[int, int](), dict[int, int]()  # start times by correlation id, of what launches kernels
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
    """None for a mark in a GPU's timeline, which spans the kernels of an instruction. torch 2.11 does not expose the
    type of an activity."""
    if event.device_type() == DeviceType.CPU:
        return OPERATOR
    return None if event.is_user_annotation() or event.name().startswith(MARK) else KERNEL


def _sentence(error: Exception) -> str:
    return " ".join(str(error).split())[:MOST_NAME] or type(error).__name__
