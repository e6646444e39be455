"""A rank's progress in a memory-mapped file of 40 bytes, readable while its interpreter is blocked or gone."""

from __future__ import annotations

import mmap
import struct
import time
from pathlib import Path
from typing import NamedTuple

_FORMAT = struct.Struct("<qqqdq")


class Progress(NamedTuple):
    """`counter` is the index in the rank's stream (-1 between steps), `since` the time it was reached, in seconds of
    the host's monotonic clock. The stream is that of `program` of the plan's programs. In an evaluation of the weights
    of `step` steps, it counts the actions of all rounds."""

    generation: int
    step: int
    counter: int
    since: float
    program: int = 0


class ProgressFile:
    """Written by the train thread before every instruction, at the cost of copying 40 bytes."""

    def __init__(self, path: Path, generation: int) -> None:
        path.write_bytes(bytes(_FORMAT.size))
        with path.open("r+b") as file:
            self.memory = mmap.mmap(file.fileno(), _FORMAT.size)
        self.begin_generation(generation)

    def begin_generation(self, generation: int) -> None:
        self.generation = generation
        self.write(-1, -1)

    def write(self, step: int, counter: int, program: int = 0) -> None:
        _FORMAT.pack_into(self.memory, 0, self.generation, step, counter, time.monotonic(), program)


def read_progress(path: Path) -> Progress:
    """The last state that a rank wrote, even if the rank is gone."""
    generation, step, counter, since, program = _FORMAT.unpack(path.read_bytes())
    return Progress(generation, step, counter, since, program)
