"""What a rank is doing, in memory that outlives a locked interpreter: a file of 32 bytes that both sides map."""

from __future__ import annotations

import mmap
import struct
import time
from pathlib import Path
from typing import NamedTuple

_FORMAT = struct.Struct("<qqqd")


class State(NamedTuple):
    """`counter` is the index in the rank's stream (-1 between steps), `since` the monotonic second it was reached."""

    generation: int
    step: int
    counter: int
    since: float


class ProgressFile:
    """Written by the train thread before every instruction, at the cost of one copy of 32 bytes."""

    def __init__(self, path: Path, generation: int) -> None:
        path.write_bytes(bytes(_FORMAT.size))
        with path.open("r+b") as file:
            self.memory = mmap.mmap(file.fileno(), _FORMAT.size)
        self.generation = generation
        self.write(-1, -1)

    def renew(self, generation: int) -> ProgressFile:
        """The same board in a later generation."""
        self.generation = generation
        self.write(-1, -1)
        return self

    def write(self, step: int, counter: int) -> None:
        _FORMAT.pack_into(self.memory, 0, self.generation, step, counter, time.monotonic())


def read_board(path: Path) -> State:
    """The state a rank left in its file, whatever became of the rank."""
    return State(*_FORMAT.unpack(path.read_bytes()))
