"""A rank's progress in a memory-mapped file of 56 bytes, readable even if its interpreter is blocked or gone."""

from __future__ import annotations

import mmap
import struct
import time
from pathlib import Path
from typing import NamedTuple

from pentad.schedules.spec.mesh import LAYER_AXES

_FORMAT = struct.Struct("<qqqdqqq")
_LAYER_WAIT = struct.Struct("<qq")
_LAYER_WAIT_AT = _FORMAT.size - _LAYER_WAIT.size
AXES = ("", *LAYER_AXES)


class Progress(NamedTuple):
    """`counter` is the index in the rank's stream of program `program` (-1 between steps), `since` the time it was
    reached, in seconds of the host's monotonic clock. In an evaluation of the weights after `step` steps, `counter`
    counts the actions of all rounds.

    `waits` is the number of operations inside layers that this instruction has begun to wait for; -1 if unknown, and on
    a GPU before the first. `axis` is the axis ('tp', 'cp' or 'ep') of the last of them while it is waited for (on a GPU
    until the next one), else ''.
    """

    generation: int
    step: int
    counter: int
    since: float
    program: int = 0
    waits: int = -1
    axis: str = ""


class ProgressFile:
    """Written by the train thread before every instruction, at the cost of copying 56 bytes."""

    def __init__(self, path: Path, generation: int) -> None:
        path.write_bytes(bytes(_FORMAT.size))
        with path.open("r+b") as file:
            self.memory = mmap.mmap(file.fileno(), _FORMAT.size)
        self.counts_waits = False  # inside layers
        self.begin_generation(generation)

    def begin_generation(self, generation: int) -> None:
        self.generation = generation
        self.write(-1, -1)

    def write(self, step: int, counter: int, program: int = 0) -> None:
        self.waits = 0 if self.counts_waits else -1
        _FORMAT.pack_into(self.memory, 0, self.generation, step, counter, time.monotonic(), program, self.waits, 0)

    def read(self) -> Progress:
        """The state that was written last. From any thread."""
        return _progress(self.memory[:])

    def begin_wait(self, axis: str) -> None:
        """The instruction waits for an operation inside a layer."""
        self.waits += 1
        _LAYER_WAIT.pack_into(self.memory, _LAYER_WAIT_AT, self.waits, axis_number(axis))

    def end_wait(self) -> None:
        _LAYER_WAIT.pack_into(self.memory, _LAYER_WAIT_AT, self.waits, 0)


def read_progress(path: Path) -> Progress:
    """The last state that a rank wrote, even if the rank is gone."""
    return _progress(path.read_bytes())


def axis_number(axis: str) -> int:
    """The index in AXES; 0, no axis, for a group that is not along tp, cp or ep."""
    return AXES.index(axis) if axis in AXES else 0


def _progress(content: bytes) -> Progress:
    generation, step, counter, since, program, waits, axis = _FORMAT.unpack(content)
    return Progress(generation, step, counter, since, program, waits, AXES[axis])
