"""Safetensors files that are written a tensor at a time: sizes first, then each tensor when its turn comes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from pentad.schedules.ir.errors import PentadError
from pentad.workers.checkpoint.atomic_io import write_file
from pentad.workers.checkpoint.manifest import Shard, Spec
from pentad.workers.checkpoint.safetensors_io import head, nbytes

ABOUT = {"format": "pt"}  # that a file is torch's is what some readers ask for


class Planned(NamedTuple):
    """A file's tensors by name, in order."""

    specs: dict[str, Spec]

    @property
    def bytes(self) -> int:
        return sum(map(nbytes, self.specs.values()))


def cut(specs: Iterable[tuple[str, Spec]], limit: int) -> list[Planned]:
    """Files of at most `limit` bytes of tensors, in order; a larger tensor has one of its own."""
    files: list[Planned] = []
    room = 0
    for name, spec in specs:
        if not files or nbytes(spec) > room:
            files.append(Planned({}))
            room = limit
        files[-1].specs[name] = spec
        room -= nbytes(spec)
    return files


def write(path: Path, planned: Planned, pieces: Iterable[torch.Tensor]) -> Shard:
    """Writes a file, durably; `pieces` are all its elements on the CPU in the order of `planned`, in their dtypes, cut
    anywhere. Whoever makes them sees each one gone before it makes the next."""
    shard = write_file(path, _buffers(planned, pieces))
    return Shard(path.name, *shard, planned.specs)


def _buffers(planned: Planned, pieces: Iterable[torch.Tensor]) -> Iterator[memoryview]:
    yield memoryview(head(planned.specs, ABOUT))
    written = 0
    for piece in pieces:
        written += piece.nbytes
        yield piece.contiguous().reshape(-1).view(torch.uint8).numpy().data
        del piece
    if written != planned.bytes:
        raise PentadError(f"{written} bytes of tensors came: expected {planned.bytes}")
