"""The order of instructions: lanes are CUDA streams with events between them on a GPU, program order on a CPU.

An instruction waits for the previous one of its lane, for those in `waits`, and for nothing else.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from pentad.schedules.ir.instruction import Action, Instruction, Key, Op
from pentad.workers.cuda_streams import stream_of
from pentad.workers.lanes.gpu_progress import GpuProgress
from pentad.workers.lanes.gpu_timer import GpuTimer, StepTimes
from pentad.workers.parallel.async_ops import Arrival, ContinuedWork, host_waits
from pentad.workers.rank_waits import rank_waits
from pentad.workers.run_delay import run_delay

AHEAD = 2  # instructions that the host issues ahead of the compute lane
BETWEEN = ("HOST", -1)  # between instructions
OpSeconds = dict[tuple[str, int], float]  # of a step, by op and stage
Check = Callable[[], None]  # called while the host waits; raises Aborted once the generation is over


class StepWaits(NamedTuple):
    """Seconds of a step that compute waited for communication inside layers, and seconds that the thread was ready to
    run while other processes had the cores (BETWEEN: between instructions)."""

    layers: OpSeconds
    starved: OpSeconds

    def rows(self) -> dict[str, Any]:
        """In a StepResult's form."""
        layers, starved = (tuple((*where, took) for where, took in seconds.items()) for seconds in self)
        return {"layer_waits": layers, "starved": starved}


class HostStreams:
    """CPU: compute is synchronous; transfers and reductions run in the background until an instruction waits for them.

    Same interface as `CudaStreams`.
    """

    def __init__(self) -> None:
        self.steps: list[StepTimes] = []
        self.waits: list[StepWaits] = []  # of each step
        self.read_waits: list[StepWaits] = []  # of the steps read last
        host_waits.delay_clock = run_delay
        # Totals at the end of the last instruction: waits inside layers, and run delay outside these waits.
        self.waited, self.delayed = host_waits.seconds, 0.0
        self.running: dict[Key, tuple[Sequence[Arrival], int]] = {}  # works, and the index of their times

    @property
    def has_unread_steps(self) -> bool:
        return bool(self.steps)

    def begin_step(self) -> None:
        self.steps.append([])
        self.waits.append(StepWaits({}, {}))
        self.delayed = run_delay() - host_waits.run_delay

    @contextmanager
    def issue(self, part: Instruction) -> Iterator[None]:
        for key in part.waits:
            self._wait_for(key)
        self._count_delay(BETWEEN)
        times, where = self.steps[-1], (part.op.value, part.stage)
        start = time.monotonic()
        yield
        times.append((part, start, time.monotonic()))
        self._count_delay(where)  # counted, like waits, for the half of an overlapped pair that ends first
        if host_waits.seconds > self.waited:
            waits = self.waits[-1].layers
            waits[where] = waits.get(where, 0.0) + host_waits.seconds - self.waited
            self.waited = host_waits.seconds

    def end_with(self, part: Instruction, works: Sequence[Arrival]) -> None:
        self.running[part.key] = (works, len(self.steps[-1]))

    def throttle(self, check: Check, ahead: int = 0) -> None:
        """Nothing to do: compute is synchronous."""

    def wait_previous_step(self, check: Check) -> None:
        """Nothing to do: compute is synchronous."""

    def end_action(self, action: Action) -> None:
        """Nothing to do: the progress file counts the waits inside layers for each action."""

    def join(self, key: Key) -> None:
        """Nothing to do: what other lanes do for compute has already ended."""

    def join_sends(self) -> None:
        """Nothing to do: sends have already ended."""

    def finish(self, check: Check) -> None:
        """Nothing to do: the last instruction of a step waits for all others."""

    def discard_step(self, check: Check) -> None:
        for key in list(self.running):
            self._wait_for(key)
        self.steps[-1].clear()
        self.waits[-1] = StepWaits({}, {})

    def read_times(self, check: Check, num_open: int = 0) -> list[StepTimes]:
        count = len(self.steps) - num_open
        found, self.steps = self.steps[:count], self.steps[count:]
        self.read_waits, self.waits = self.waits[:count], self.waits[count:]
        return found

    def take_waits(self) -> dict[str, Any]:
        """The waits, in a StepResult's form, of the oldest step read last that has not been taken."""
        return self.read_waits.pop(0).rows()

    def _wait_for(self, key: Key) -> None:
        if key not in self.running:
            return
        works, index = self.running.pop(key)
        delayed = run_delay()
        for work in works:
            with rank_waits.abandonable():
                work.wait()
            if isinstance(work, ContinuedWork):
                work.follow()
        times = self.steps[-1]
        part, start, _ = times[index]
        # Time without a core after the transfer completed is no part of the transfer.
        times[index] = (part, start, max(start, time.monotonic() - (run_delay() - delayed)))

    def _count_delay(self, where: tuple[str, int]) -> None:
        """Counts the run delay since the last call as that of `where`."""
        delayed, starved = run_delay() - host_waits.run_delay, self.waits[-1].starved
        if delayed > self.delayed:
            starved[where] = starved.get(where, 0.0) + delayed - self.delayed
        self.delayed = delayed


class CudaStreams:
    """GPU: one stream per lane. The host waits for no event while it issues a step.

    `timer` measures instructions; `progress` counts those that the GPU has completed.
    """

    def __init__(self, device: torch.device, lanes: set[str]) -> None:
        self.device, self.compute = device, torch.cuda.current_stream(device)
        self.streams = {lane: stream_of(device, lane) for lane in sorted(lanes)} | {"compute": self.compute}
        self.timer, self.progress = GpuTimer(device), GpuProgress(self.streams)
        self.ends: dict[Key, tuple[str, torch.cuda.Event]] = {}  # lane and event of each instruction of the step

    @property
    def has_unread_steps(self) -> bool:
        return bool(self.timer.steps)

    def begin_step(self) -> None:
        self.progress.begin_step()
        self.ends.clear()
        self.timer.begin_step()
        before = self.timer.event()  # once the previous step's compute has ended, its slots and send buffers are free
        before.record(self.compute)
        for lane, stream in self.streams.items():
            if lane != "compute":
                stream.wait_event(before)
        self.timer.free.append(before)

    @contextmanager
    def issue(self, part: Instruction) -> Iterator[None]:
        """What is launched inside runs on the instruction's lane, after the instructions it waits for."""
        lane, stream = part.lane, self.streams[part.lane]
        self.progress.issuing += 1
        for key in part.waits:
            other, event = self.ends[key]
            if other != lane:
                stream.wait_event(event)
        start, end = self.timer.event(), self.timer.event()
        with torch.cuda.stream(stream):
            start.record(stream)
            yield
            end.record(stream)
        self.progress.count(lane)
        self.progress.issuing -= 1
        self.ends[part.key] = (lane, end)
        self.timer.add(part, start, end)

    def end_with(self, part: Instruction, works: Sequence[Arrival]) -> None:
        """Makes the instruction being issued end with these operations."""
        for work in works:
            work.wait()  # makes the lane's stream, not the host, wait for NCCL's

    def throttle(self, check: Check, ahead: int = AHEAD) -> None:
        """Waits until at most `ahead` instructions of the compute lane remain.

        A host that issues until the driver's queue is full blocks inside the driver and holds up the driver calls of
        all other threads, too.
        """
        self.progress.wait_compute(check, ahead)

    def wait_previous_step(self, check: Check) -> None:
        """Waits until the compute lane has completed the previous step."""
        self.progress.wait_previous_step(check)

    def end_action(self, action: Action) -> None:
        """Counts the waits inside layers of the next action from 1."""
        if action.lane == "compute":
            self.progress.end_waits()

    def join(self, key: Key) -> None:
        """Makes the compute lane wait for this rank's part of an instruction of the step."""
        self.compute.wait_event(self.ends[key][1])

    def join_sends(self) -> None:
        """Makes the compute lane wait for all sends: they read memory that it allocates."""
        for lane, stream in self.streams.items():
            if lane.startswith("SEND"):
                self.compute.wait_stream(stream)

    def finish(self, check: Check) -> None:
        """Waits for everything issued."""
        self.progress.wait_all(check)

    def discard_step(self, check: Check) -> None:
        """Waits for everything issued and forgets the instructions of the newest step."""
        self.progress.wait_all(check)
        self.timer.discard_step()
        self.ends.clear()

    def read_times(self, check: Check, num_open: int = 0) -> list[StepTimes]:
        """Waits for all steps except the newest `num_open`, which may still run, and returns their times; waits for the
        device if no step is open."""
        count = len(self.timer.steps) - num_open
        closed, later = self.timer.steps[:count], self.timer.steps[count:]
        if later:
            self.progress.wait_all(check, Counter(part.lane for step in later for part, _, _ in step.events))
            last = {part.lane: end for step in closed for part, _, end in step.events}
            for end in last.values():
                end.synchronize()  # already complete, but the driver may not have noticed yet
        else:
            torch.cuda.synchronize(self.device)
        return self.timer.read(count)

    def take_waits(self) -> dict[str, Any]:
        """Empty: a GPU waits inside compute instructions, where nothing is timed, and shares no cores."""
        return {}

    def position(self) -> tuple[int, Instruction] | None:
        """(steps behind the newest one, instruction) that the compute lane has reached, or the NORM that this
        instruction waits for, where all ranks meet; None if the lane is idle. From any thread."""
        if not (compute := self._incomplete("compute")):
            return None
        behind, part = compute[0]
        if all(key.op is not Op.NORM for key in part.waits):
            return behind, part
        reductions = self._incomplete(Instruction(Op.NORM).lane)
        return next((each for each in reductions if each[0] == behind and each[1].op is Op.NORM), (behind, part))

    def _incomplete(self, lane: str) -> list[tuple[int, Instruction]]:
        """(steps behind the newest one, instruction) of all that a lane has not completed, in order."""
        steps, count = list(self.timer.steps), self.progress.pending(lane)
        behind, issued = len(steps), list[tuple[int, Instruction]]()
        for step in steps:
            behind -= 1
            issued += [(behind, part) for part, *_ in list(step.events) if part.lane == lane]
        return issued[-count:] if 0 < count <= len(issued) else []


Lanes = HostStreams | CudaStreams
