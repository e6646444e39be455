"""A copy of a rank's training state in host memory, taken while training continues and written from another thread.

Why it is consistent: only `update` blocks change the state, and they run one after another on the train thread. A copy
after `step` steps begins after the block of that step and is complete before the next block begins; on a GPU both are
events that streams wait for, not the host. State that is in host memory anyway is not copied but read in place, and the
next block begins when it has been written. So a copy never contains half an update, nor a step that is taken back: an
optimistic step (PostValidatedStep) writes compute weights, which are not part of the state, and its block follows once
the norm is known.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch

from pentad.schedules.ir.errors import PentadError
from pentad.workers.checkpoint.local_storage import Publishing
from pentad.workers.checkpoint.manifest import Spec
from pentad.workers.checkpoint.safetensors_header import Stored
from pentad.workers.checkpoint.safetensors_io import DTYPES
from pentad.workers.checkpoint.shards import stored_order
from pentad.workers.cuda_streams import stream_of
from pentad.workers.host_memory import HostMemory

CHUNK_BYTES = 32 << 20  # per copy to the host, so that other users of the copy engine get their turn
ALIGNMENT = 64  # bytes
POLL_SECONDS = 0.005
Files = Mapping[str, Mapping[str, torch.Tensor]]  # tensors by file and name


@dataclass(frozen=True)
class Copy:
    """Files in host memory, on a GPU complete after `end`; they are then the state after `version` steps. On a CPU the
    copy took `seconds`."""

    step: int
    files: dict[str, dict[str, torch.Tensor]]
    version: torch.Tensor
    seconds: float = 0.0
    begin: torch.cuda.Event | None = None
    end: torch.cuda.Event | None = None


class Snapshots:
    """The snapshots of one rank and generation, one at a time, after `reserve`. `request` and `update` are for the
    train thread, `take` and `release` for the one that writes. `version` is the number of steps in the state once the
    stream has got there. With `in_place`, state on the host is not copied; `check` is called while an update waits for
    it to be written, and may raise."""

    def __init__(
        self,
        device: torch.device,
        *,
        in_place: bool = False,
        check: Callable[[], None] = lambda: None,
        lane: str = "snapshots",
    ) -> None:
        self.device, self.version = device, -1
        self.memory: HostMemory | None = None
        self.in_place, self.check, self._reading = in_place, check, False
        self.stream = stream_of(device, lane) if device.type == "cuda" else None
        self._changed = threading.Condition()
        self._requested: tuple[int, Files, torch.Tensor] | None = None
        self._copy: Copy | Exception | None = None  # until `release`
        self._end: torch.cuda.Event | None = None  # of the newest copy
        self._given_up = -1  # steps of the newest snapshot if it was given up

    def reserve(self, files: Files) -> HostMemory:
        """Allocates memory for a snapshot of these files, which takes seconds for many GB."""
        size = snapshot_bytes(self._copied(files))
        if self.memory is None or self.memory.buffer.numel() != size:
            if self.memory is not None:
                self.memory.close()
            self.memory = None  # freed first
            self.memory = HostMemory(size, self.device, "a checkpoint needs")
        return self.memory

    def request(self, step: int, files: Files, version: torch.Tensor) -> None:
        """Has the state after `step` steps copied: now, or after the update that produces it. `files` are views of the
        state, `version` is its number of steps on the device."""
        with self._changed:
            if self._copy is not None or self._requested is not None or self.version > step:
                self._copy = PentadError(f"there is no snapshot of step {step}: expected one at a time, in order")
                self._changed.notify_all()
                return
            self._requested, self._given_up = (step, files, version), -1
        if self.version == step:
            self._begin()

    def fail(self, error: Exception) -> None:
        """Makes `take` raise this error."""
        with self._changed:
            self._copy = error
            self._changed.notify_all()

    @contextmanager
    def failing(self) -> Iterator[None]:
        """Makes `take` raise any error of the block, too."""
        try:
            yield
        except Exception as error:
            self.fail(error)
            raise

    @contextmanager
    def update(self, step: int) -> Iterator[None]:
        """Wraps a change of the state, which is then that of `step` steps."""
        if self._end is not None:
            torch.cuda.current_stream(self.device).wait_event(self._end)
        with self._changed:
            while self._reading:
                self.check()
                self._changed.wait(POLL_SECONDS)
        yield
        self.version = step
        if self._requested is not None and self._requested[0] == step:
            self._begin()

    def take(self, step: int, check: Callable[[], None]) -> tuple[dict[str, dict[str, torch.Tensor]], float]:
        """Waits for the requested snapshot of `step` steps; returns it, and the seconds that the copy took. Call
        `release` when its memory is no longer read.

        Calls `check`, which may raise, while it waits. Raises what prevented the snapshot; the next one may then be
        requested.
        """
        with self._changed:
            while self._copy is None:
                check()
                self._changed.wait(POLL_SECONDS)
            copy = self._copy
        if isinstance(copy, Exception):
            self.release()
            raise copy
        while copy.end is not None and not copy.end.query():
            check()
            time.sleep(POLL_SECONDS)
        if (copy.step, int(copy.version)) != (step, step):
            check()  # raises if a fence has prevented the step
            self.release()
            raise PentadError(f"the snapshot is of step {int(copy.version)}: expected {step}")
        seconds = copy.seconds if copy.begin is None or copy.end is None else copy.begin.elapsed_time(copy.end) / 1000
        return copy.files, seconds

    @contextmanager
    def publishing(self, step: int, publishing: Publishing) -> Iterator[None]:
        """`publishing()` for a file of the snapshot of `step` steps. Raises PentadError if the snapshot was given
        up."""
        with publishing():
            if self._given_up == step:
                raise PentadError(f"the snapshot of step {step} was given up before it had been written")
            yield

    def give_up(self, step: int) -> None:
        """Gives up the snapshot of `step` steps: no update waits for it to be written. Its writer may still read it
        until `release`. From any thread."""
        with self._changed:
            self._given_up, self._reading = step, False
            self._changed.notify_all()

    def release(self) -> None:
        """Allows the next snapshot to be requested."""
        with self._changed:
            self._copy, self._reading = None, False
            self._changed.notify_all()

    def detach(self) -> HostMemory:
        """Instead of `release`: hands the memory with the snapshot over to the caller. The next one needs `memory` to
        be set again."""
        assert self.memory is not None
        memory, self.memory = self.memory, None
        self.release()
        return memory

    def close(self) -> None:
        """Drops any request and waits for the copy in progress."""
        self._requested, self._reading = None, False
        if self._end is not None:
            self._end.synchronize()

    def _copied(self, files: Files) -> Files:
        """The files without tensors that are read in place."""
        if not self.in_place:
            return files
        return {
            file: {name: each for name, each in tensors.items() if each.device.type != "cpu"}
            for file, tensors in files.items()
        }

    def _begin(self) -> None:
        """Starts the copy, beside what the current stream does next."""
        assert self._requested is not None and self.memory is not None
        (step, files, version), self._requested = self._requested, None
        copied = self._copied(files)
        targets = _views(self.memory.buffer, copied)
        pairs = [(source, targets[file][name]) for file, its in copied.items() for name, source in its.items()]
        self._reading = self.in_place
        for file, tensors in files.items() if self.in_place else ():
            targets[file] = {**tensors, **targets[file]}
        version_copy = torch.empty((), dtype=torch.int64, pin_memory=self.stream is not None)
        pairs.append((version, version_copy))
        if self.stream is None:
            began = time.monotonic()
            for source, target in pairs:
                target.copy_(source)
            copy = Copy(step, targets, version_copy, time.monotonic() - began)
        else:
            begin, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self.stream.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(self.stream):
                begin.record()
                for source, target in pairs:
                    _copy_in_chunks(source, target, non_blocking=True)
                self._end.record()
            copy = Copy(step, targets, version_copy, begin=begin, end=self._end)
        with self._changed:
            self._copy = copy
            self._changed.notify_all()


def _copy_in_chunks(source: torch.Tensor, target: torch.Tensor, *, non_blocking: bool) -> None:
    if source.device == target.device or not source.is_contiguous():
        target.copy_(source)
        return
    size = max(1, CHUNK_BYTES // source.element_size())
    for piece, place in zip(source.view(-1).split(size), target.view(-1).split(size), strict=True):
        place.copy_(piece, non_blocking=non_blocking)


@contextmanager
def state_update(snapshots: Sequence[Snapshots], step: int) -> Iterator[None]:
    """Enters `update` of all these snapshots."""
    with ExitStack() as stack:
        for each in snapshots:
            stack.enter_context(each.update(step))
        yield


def copy_to(buffer: torch.Tensor, files: Files) -> None:
    """Synchronously copies these files to host memory [snapshot_bytes], arranged by their `layout`."""
    for file, targets in _views(buffer, files).items():
        for name, target in targets.items():
            _copy_in_chunks(files[file][name], target, non_blocking=False)


def snapshot_bytes(files: Files) -> int:
    """Bytes of host memory that a snapshot of these files takes."""
    return sum(_size(tensor) for tensors in files.values() for tensor in tensors.values())


def layout(files: Files) -> dict[str, dict[str, Stored]]:
    """Where a snapshot of these files has each tensor in its memory."""
    found, at = dict[str, dict[str, Stored]](), 0
    for file, tensors in files.items():
        found[file] = {}
        for name in stored_order(dict(tensors)):
            tensor = tensors[name]
            found[file][name] = Stored(Spec(dtype=DTYPES[tensor.dtype], shape=list(tensor.shape)), at)
            at += _size(tensor)
    return found


def _size(tensor: torch.Tensor) -> int:
    return -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT


def _views(buffer: torch.Tensor, files: Files) -> dict[str, dict[str, torch.Tensor]]:
    """Views of the buffer for all tensors."""
    found = dict[str, dict[str, torch.Tensor]]()
    for file, places in layout(files).items():
        found[file] = {}
        for name, (_, at) in places.items():
            tensor = files[file][name]
            found[file][name] = buffer[at : at + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
    return found
