"""When instructions run: lanes as CUDA streams with events on GPU, plain order on CPU; both record every span.

An instruction starts behind the earlier ones of its lane and behind those it waits for, and nothing else.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist

from pentad.schedules.ir.instruction import Instruction, Key
from pentad.workers.transport.stream_flags import checked

AHEAD = 2  # instructions that a host issues before the GPU needs them
POLL_SECONDS = 5e-5


class Times(list[tuple[Instruction, float, float]]):
    """(instruction, start, end) of one step in seconds on the host's monotonic clock."""


class Issued(NamedTuple):
    """A step on a GPU: an event that ended when the host's monotonic clock was at `zero_at`, and instructions, each
    with an event before and one after it."""

    zero: torch.cuda.Event
    zero_at: float
    spans: list[tuple[Instruction, torch.cuda.Event, torch.cuda.Event]]


class HostStreams:
    """CPU: compute is synchronous; a transfer or reduction runs in the background until somebody waits for it."""

    def __init__(self) -> None:
        self.steps: list[Times] = []
        self.running: dict[Key, tuple[list[dist.Work], int]] = {}

    def begin(self) -> None:
        self.steps.append(Times())

    @contextmanager
    def on(self, part: Instruction) -> Iterator[None]:
        for key in part.waits:
            self._await(key)
        spans = self.steps[-1]
        start = time.monotonic()
        yield
        spans.append((part, start, time.monotonic()))

    def leave(self, part: Instruction, reader: Instruction) -> None:
        """Nothing to do: compute is synchronous."""

    def past(self, check: Callable[[], None]) -> None:
        """A host that computes itself is through with all it did before."""

    def near(self, check: Callable[[], None], ahead: int = 0) -> None:
        """Nothing to do: compute is synchronous."""

    def finish_with(self, part: Instruction, work: list[dist.Work]) -> None:
        self.running[part.key] = (work, len(self.steps[-1]))

    def drop(self, check: Callable[[], None]) -> None:
        """Waits for all that was begun in this step and forgets it."""
        for key in list(self.running):
            self._await(key)
        self.steps[-1].clear()

    def collect(self, left_open: int = 0, check: Callable[[], None] = lambda: None) -> list[Times]:
        """Of all steps but the newest `left_open` ones, which a later call has."""
        count = len(self.steps) - left_open
        steps, self.steps = self.steps[:count], self.steps[count:]
        return steps

    def _await(self, key: Key) -> None:
        if key not in self.running:
            return
        work, index = self.running.pop(key)
        for each in work:
            each.wait()
        spans = self.steps[-1]
        part, start, _ = spans[index]
        spans[index] = (part, start, time.monotonic())


class CudaStreams:
    """GPU: a stream a lane, an event before and after every instruction; the host waits for no event in a step."""

    def __init__(self, device: torch.device, lanes: set[str]) -> None:
        from cuda.bindings import driver

        self.device, self.driver = device, driver
        self.compute = torch.cuda.current_stream(device)
        self.streams = {lane: torch.cuda.Stream(device) for lane in sorted(lanes)} | {"compute": self.compute}
        self.steps: list[Issued] = []
        self.ended: dict[Key, tuple[str, torch.cuda.Event]] = {}
        self.left: dict[tuple[Key, Key], torch.cuda.Event] = {}
        self.spare: list[torch.cuda.Event] = []
        # Where nothing else runs, so that an event ends at once. Streams come out of a pool for each priority and may
        # come twice: that of the high ones has no lane.
        self.clock = torch.cuda.Stream(device, priority=-1)
        # How many instructions each lane has ended, written by the GPU itself: its driver, asked for an event, may be
        # held up behind a stream that waits.
        self.ends = torch.zeros(len(self.streams), dtype=torch.int32).pin_memory()
        self.word = {lane: self.ends.data_ptr() + 4 * number for number, lane in enumerate(self.streams)}
        self.seen, self.mine = self.ends.numpy(), list(self.streams).index("compute")
        self.issued: Counter[str] = Counter()
        self.former = 0  # instructions of the compute lane in earlier steps

    def begin(self) -> None:
        self.former = self.issued["compute"]
        self.ended.clear()
        self.left.clear()
        zero = self._event()
        zero.record(self.clock)
        zero.synchronize()
        self.steps.append(Issued(zero, time.monotonic(), []))
        before = self._event()  # slots and send buffers of the step before are free when its compute has ended
        before.record(self.compute)
        for lane, stream in self.streams.items():
            if lane != "compute":
                stream.wait_event(before)
        self.spare.append(before)

    @contextmanager
    def on(self, part: Instruction) -> Iterator[None]:
        lane, stream = part.lane, self.streams[part.lane]
        for key in part.waits:
            where, event = self.ended[key]
            if where != lane:
                stream.wait_event(self.left.get((key, part.key), event))
        start, end = self._event(), self._event()
        with torch.cuda.stream(stream):
            start.record(stream)
            yield
            end.record(stream)
        self.issued[lane] += 1
        checked(self.driver.cuStreamWriteValue32(stream.cuda_stream, self.word[lane], self.issued[lane], 0))
        self.ended[part.key] = (lane, end)
        self.steps[-1].spans.append((part, start, end))

    def leave(self, part: Instruction, reader: Instruction) -> None:
        """While `part` is being issued: what `reader` waits for is there already."""
        if (part.key, reader.key) not in self.left:
            self.left[part.key, reader.key] = torch.cuda.Event()
            self.left[part.key, reader.key].record(self.streams[part.lane])

    def finish_with(self, part: Instruction, work: list[dist.Work]) -> None:
        for each in work:
            each.wait()  # the lane's stream waits for NCCL's own, not the host

    def near(self, check: Callable[[], None], ahead: int = AHEAD) -> None:
        """Waits until the compute lane has at most `ahead` instructions before it, calling `check` meanwhile.

        A host that runs on until the driver's queue is full is stuck in there when the GPU is, and holds up every other
        thread's calls as well.
        """
        while self.issued["compute"] - int(self.seen[self.mine]) > ahead:
            check()
            time.sleep(POLL_SECONDS)

    def past(self, check: Callable[[], None]) -> None:
        """Waits until the compute lane has come to this step, calling `check` meanwhile."""
        self.near(check, ahead=self.issued["compute"] - self.former)

    def drop(self, check: Callable[[], None]) -> None:
        """Waits for all that was begun in this step, calling `check` meanwhile, and forgets it."""
        while self.issued.total() > self.done():
            check()
            time.sleep(POLL_SECONDS)
        self.spare += [event for _, *events in self.steps[-1].spans for event in events]
        self.steps[-1].spans.clear()
        self.ended.clear()
        self.left.clear()

    def collect(self, left_open: int = 0, check: Callable[[], None] = lambda: None) -> list[Times]:
        """Of all steps but the newest `left_open` ones, which may go on: waits until the others have ended, calling
        `check` meanwhile. With none left open, waits for all that the GPU was given."""
        count = len(self.steps) - left_open
        closed, later = self.steps[:count], self.steps[count:]
        if later:
            self._await(closed, later, check)
        else:
            torch.cuda.synchronize(self.device)
        steps = []
        for zero, zero_at, spans in closed:
            at = [(part, zero.elapsed_time(a), zero.elapsed_time(b)) for part, a, b in spans]
            steps.append(Times((part, zero_at + a / 1e3, zero_at + b / 1e3) for part, a, b in at))
            self.spare += [zero, *(event for _, *events in spans for event in events)]
        self.steps = later
        return steps

    def done(self) -> int:
        """How many instructions have ended; from any thread."""
        return int(self.seen.sum())

    def reached(self) -> tuple[int, Instruction] | None:
        """(steps behind the newest one, instruction) that the compute lane is at; None when it has done all it was
        given. From any thread."""
        left = self.issued["compute"] - int(self.seen[self.mine])
        for behind, (_, _, spans) in enumerate(reversed(list(self.steps))):
            mine = [part for part, _, _ in list(spans) if part.lane == "compute"]
            if 0 < left <= len(mine):
                return behind, mine[-left]
            left -= len(mine)
        return None

    def _await(self, closed: list[Issued], later: list[Issued], check: Callable[[], None]) -> None:
        """Until every lane has ended what was issued before the later steps."""
        newer = Counter(part.lane for _, _, spans in later for part, _, _ in spans)
        until = [self.issued[lane] - newer[lane] for lane in self.streams]
        while any(int(seen) < expected for seen, expected in zip(self.seen, until, strict=True)):
            check()
            time.sleep(POLL_SECONDS)
        last = {part.lane: end for _, _, spans in closed for part, _, end in spans}
        for end in last.values():
            end.synchronize()  # each stands before the word that was seen: now the GPU's driver knows it as well

    def _event(self) -> torch.cuda.Event:
        return self.spare.pop() if self.spare else torch.cuda.Event(enable_timing=True)


Lanes = HostStreams | CudaStreams
