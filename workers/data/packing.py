"""Packs documents into sequences: each sequence holds entire documents, as many as fit.

Runs of consecutive documents are packed by best-fit decreasing (Johnson et al., SIAM J. Comput. 3, 1974): the longest
first, each into the sequence that it fills best. A document of T tokens needs T - 1 positions, because its end token is
only ever a target. A document longer than a sequence is cut into full sequences and a rest, which is packed.

The result is a table, made once per corpus and length and kept in the folder `data.cache`: a file with the CRC-32 of
what follows, the numbers of spans and of sequences, and the arrays of ARRAYS. A damaged one is made again.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left, insort
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np

from pentad.schedules.ir.errors import PentadError
from pentad.schedules.ir.regular_files import expanded
from pentad.workers.checkpoint.atomic_io import write_file
from pentad.workers.data.corpus import Corpus
from pentad.workers.data.samples import TokenSpan
from pentad.workers.data.storage import writing

RUN_POSITIONS = 2**22  # least number of positions packed together, so that sequences are nearly full
VERSION = 2
HEAD: np.dtype[Any] = np.dtype("<i8")  # the dtype of the three numbers
ARRAYS = HEAD, HEAD, np.dtype[Any]("<i4")  # the first span of each sequence, and the starts and sizes of spans


class Packs:
    """A corpus packed into `sequences` sequences of at most `length` positions.

    Raises PentadError, naming the corpus's `key`, if no document has two tokens.
    """

    def __init__(self, corpus: Corpus, length: int, cache: Path, key: str = "data.path") -> None:
        file = _file(corpus, length, cache)
        arrays = _read(file)
        if arrays is None:
            _write(corpus, length, file)
            arrays = _read(file)
        if arrays is None:
            fault = f"which has another {file.name} than was written a moment ago"
            raise PentadError(f"data.cache is '{file.parent}', {fault}: expected a disk that keeps files")
        self.first, self.starts, self.sizes = arrays
        self.sequences = len(self.first) - 1
        if not self.sequences:
            raise PentadError(f"{key} is '{corpus.path}', which has only empty documents: expected one of two tokens")

    def spans(self, number: int) -> list[TokenSpan]:
        items = self._items(number)
        return [TokenSpan(*span) for span in zip(self.starts[items].tolist(), self.sizes[items].tolist(), strict=True)]

    def lengths(self, number: int) -> np.ndarray:
        return self.sizes[self._items(number)].astype(np.int64)

    def _items(self, number: int) -> slice:
        return slice(int(self.first[number]), int(self.first[number + 1]))


def is_packed(corpus: Corpus, length: int, cache: Path) -> bool:
    """Whether the table for this corpus and length exists already."""
    return _file(corpus, length, cache).exists()


def pack(sizes: list[int], length: int) -> list[list[int]]:
    """Indices of the items in each sequence, by best-fit decreasing; all sizes are 1 to `length`. The items of each
    sequence are ascending, and so are the sequences by their first items."""
    open_rooms: list[tuple[int, int]] = []  # (room, sequence), ascending
    found: list[list[int]] = []
    for item in sorted(range(len(sizes)), key=lambda item: (-sizes[item], item)):
        at = bisect_left(open_rooms, (sizes[item], -1))
        room, sequence = open_rooms.pop(at) if at < len(open_rooms) else (length, len(found))
        if sequence == len(found):
            found.append([])
        found[sequence].append(item)
        if room > sizes[item]:
            insort(open_rooms, (room - sizes[item], sequence))
    return sorted(sorted(items) for items in found)


def packed(corpus: Corpus, length: int) -> Iterator[list[TokenSpan]]:
    """The spans of every sequence, in the order of the corpus."""
    pieces, positions = list[TokenSpan](), 0
    for piece in _pieces(corpus, length):
        pieces.append(piece)
        positions += piece.size
        if positions >= RUN_POSITIONS:
            yield from _packed(pieces, length)
            pieces, positions = [], 0
    yield from _packed(pieces, length)


def _packed(pieces: list[TokenSpan], length: int) -> Iterator[list[TokenSpan]]:
    for items in pack([piece.size for piece in pieces], length):
        yield [pieces[item] for item in items]


def _pieces(corpus: Corpus, length: int) -> Iterator[TokenSpan]:
    """The documents, cut if they are longer than a sequence. Adjacent parts share a token, as adjacent windows do."""
    for start, tokens in corpus.extents():
        for at in range(start, start + tokens - 1, length):
            yield TokenSpan(at, min(length, start + tokens - 1 - at))


def _file(corpus: Corpus, length: int, cache: Path) -> Path:
    key = hashlib.sha256(
        f"{VERSION}/{corpus.fingerprint}/{corpus.tokens}/{length}/{RUN_POSITIONS}".encode()
    ).hexdigest()
    return expanded(cache) / f"packed-{length}-{key[:16]}"


def _read(file: Path) -> list[np.ndarray] | None:
    """The arrays of a table; None if it does not exist or is damaged."""
    try:
        content = np.memmap(file, np.uint8, "r")
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError for an empty file
        return None
    except OSError as error:
        fault = f"has {file.name}, which cannot be read ({error.strerror or error})"
        raise PentadError(f"data.cache {fault}: expected a table, which is made again if you remove that") from None
    start = 3 * HEAD.itemsize
    if len(content) < start or int(content[: HEAD.itemsize].view(HEAD)[0]) != crc32(content[HEAD.itemsize :].data):
        return None
    spans, sequences = content[HEAD.itemsize : start].view(HEAD).tolist()
    arrays = []
    for dtype, count in zip(ARRAYS, (sequences + 1, spans, spans), strict=True):
        arrays.append(content[start : start + count * dtype.itemsize].view(dtype))
        start += count * dtype.itemsize
    return arrays


def _write(corpus: Corpus, length: int, file: Path) -> None:
    """Packs a corpus and writes the table, atomically: open maps of an old one stay valid, and processes that race
    write the same content."""
    first, starts, sizes = [0], list[int](), list[int]()
    for spans in packed(corpus, length):
        starts += (span.start for span in spans)
        sizes += (span.size for span in spans)
        first.append(len(starts))
    arrays = zip(ARRAYS, (first, starts, sizes), strict=True)
    parts = [np.array([len(starts), len(first) - 1], HEAD), *(np.array(values, dtype) for dtype, values in arrays)]
    content = b"".join(part.tobytes() for part in parts)
    with writing(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_file(file, [memoryview(np.array([crc32(content)], HEAD).tobytes()), memoryview(content)])
