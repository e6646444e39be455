"""Measures instructions on a GPU: an event before and after each, converted to the host's monotonic clock."""

from __future__ import annotations

import time
from typing import NamedTuple

import torch

from pentad.schedules.ir.instruction import Instruction
from pentad.schedules.simulate.timeline import Span
from pentad.schedules.spec.plan import Plan

StepTimes = list[tuple[Instruction, float, float]]  # instruction, start and end in seconds of the monotonic clock


class TimedStep(NamedTuple):
    """`zero` completed when the host's monotonic clock was at `zero_seconds`; `events` are (instruction, start,
    end)."""

    zero: torch.cuda.Event
    zero_seconds: float
    events: list[tuple[Instruction, torch.cuda.Event, torch.cuda.Event]]


class GpuTimer:
    """The events of steps that have not been read. Events are reused."""

    def __init__(self, device: torch.device) -> None:
        self.steps: list[TimedStep] = []
        self.free: list[torch.cuda.Event] = []
        # On a separate stream, an event completes immediately. torch takes streams from one pool for each priority and
        # may return one twice; no lane has a high priority.
        self.clock = torch.cuda.Stream(device, priority=-1)

    def begin_step(self) -> None:
        zero = self.event()
        zero.record(self.clock)
        zero.synchronize()
        self.steps.append(TimedStep(zero, time.monotonic(), []))

    def event(self) -> torch.cuda.Event:
        return self.free.pop() if self.free else torch.cuda.Event(enable_timing=True)

    def add(self, part: Instruction, start: torch.cuda.Event, end: torch.cuda.Event) -> None:
        self.steps[-1].events.append((part, start, end))

    def discard_step(self) -> None:
        """Forgets the instructions of the newest step, all of them complete."""
        self.free += [event for _, *events in self.steps[-1].events for event in events]
        self.steps[-1].events.clear()

    def read(self, count: int) -> list[StepTimes]:
        """Returns the times of the oldest `count` steps, all of them complete, and forgets them."""
        found = []
        for zero, zero_seconds, events in self.steps[:count]:
            spans = [(part, zero.elapsed_time(start), zero.elapsed_time(end)) for part, start, end in events]
            found.append([(part, zero_seconds + start / 1e3, zero_seconds + end / 1e3) for part, start, end in spans])
            self.free += [zero, *(event for _, *pair in events for event in pair)]
        self.steps = self.steps[count:]
        return found


def spans_of(plan: Plan, rank: int, step: int, times: StepTimes) -> tuple[Span, ...]:
    """The instructions that a rank of the mesh has run in a step."""
    spans = []
    for part, start, end in times:
        peer = plan.mesh.move(rank, pp=part.peer) if part.peer >= 0 else -1
        where = str(part.key), part.op.value, part.stage, part.microbatch, peer
        spans.append(Span(step, rank, part.lane, *where, start, end))
    return tuple(spans)
