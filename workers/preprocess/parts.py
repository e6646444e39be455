"""Cuts the sources into parts, which any process can build independently, so that a build can be resumed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import astuple, dataclass

from pentad.workers.preprocess.readers import FileSpan, parquet_groups
from pentad.workers.preprocess.source_files import SourceFile

_SMALLEST, _LARGEST, _ABOUT = 2**23, 2**28, 64  # limits of a part in bytes; target number of parts between them


@dataclass(frozen=True)
class BuildPart:
    """Consecutive spans of the sources; `bytes` is their total size in the files."""

    spans: tuple[FileSpan, ...]
    bytes: int

    def key(self, options: str) -> str:
        """The name of this part, built with these `options`, while the build is unfinished.

        It changes with the size and the modification time of every file in the part.
        """
        text = json.dumps([options, [astuple(span) for span in self.spans]])
        return hashlib.sha256(text.encode()).hexdigest()[:32]


def cut(files: Iterable[SourceFile]) -> tuple[BuildPart, ...]:
    """The parts in the order of the files. They depend only on the files, not on options or the number of processes.

    Large JSONL and Parquet files become several parts; files of other formats are never split.
    """
    files = tuple(files)
    size = min(max(_SMALLEST, _power_of_two(sum(file.size for file in files) // _ABOUT)), _LARGEST)
    parts, spans, total = list[BuildPart](), list[FileSpan](), 0
    for span, length in (each for file in files for each in _spans(file, size)):
        if spans and total + length > size:
            parts.append(BuildPart(tuple(spans), total))
            spans, total = [], 0
        spans.append(span)
        total += length
    return (*parts, BuildPart(tuple(spans), total)) if spans else tuple(parts)


def _power_of_two(size: int) -> int:
    """The next power of two from `size` on; with it a small change of a source leaves most parts as they are."""
    return 1 << max(size - 1, 0).bit_length()


def _spans(file: SourceFile, size: int) -> Iterator[tuple[FileSpan, int]]:
    """The spans of one file and their sizes, about `size` bytes each."""
    if file.size <= size or file.codec or file.format not in (".jsonl", ".parquet"):
        yield FileSpan(file), file.size
    elif file.format == ".jsonl":
        for start in range(0, file.size, size):
            yield FileSpan(file, start, start + size), min(size, file.size - start)
    else:
        groups = parquet_groups(file)
        each = max(1, groups * size // file.size)
        for start in range(0, groups, each):
            stop = min(start + each, groups)
            yield FileSpan(file, start, stop), file.size * (stop - start) // groups
