"""Packs documents into sequences: each sequence holds entire documents, as many as fit.

Runs of consecutive documents are packed by best-fit decreasing (Johnson et al., SIAM J. Comput. 3, 1974): the longest
first, each into the sequence that it fills best. A document of T tokens needs T - 1 positions, because its end token is
only ever a target; one that is longer than a sequence is cut into full sequences and a rest, which is packed.

The result is a table, made once for a corpus and a length, and kept in the folder `data.cache`.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left, insort
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from pentad.schedules.ir.errors import PentadError
from pentad.workers.checkpoint.atomic_io import new_folder
from pentad.workers.data.corpus import Corpus
from pentad.workers.data.samples import TokenSpan

RUN_POSITIONS = 2**22  # packed together; at least this many, so that sequences are nearly full
VERSION = 1
FIELDS = {"starts": np.int64, "sizes": np.int32, "first": np.int64}


class Packs:
    """A corpus packed into `sequences` sequences of at most `length` positions.

    Raises PentadError, which names its `key`, if no document has two tokens.
    """

    def __init__(self, corpus: Corpus, length: int, cache: Path, key: str = "data.path") -> None:
        folder = _folder(corpus, length, cache)
        if not folder.exists():
            _write(corpus, length, folder)
        try:
            tables = [np.load(folder / f"{name}.npy", mmap_mode="r") for name in FIELDS]
        except (OSError, ValueError, EOFError) as error:
            fault = f"has {folder.name}, which cannot be read ({error})"
            raise PentadError(f"data.cache {fault}: expected a table, which is made again if you remove that") from None
        self.starts, self.sizes, self.first = tables  # of spans, and the first span of each sequence
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
    """Whether the table exists already."""
    return _folder(corpus, length, cache).exists()


def pack(sizes: list[int], length: int) -> list[list[int]]:
    """Indices of the items in each sequence, by best-fit decreasing; all sizes are 1 to `length`. Items of a sequence
    and sequences are in the order of their (first) items."""
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
    """Documents, cut where they are longer than a sequence. Parts of one share a token, as adjacent windows do."""
    for start, tokens in corpus.extents():
        for at in range(start, start + tokens - 1, length):
            yield TokenSpan(at, min(length, start + tokens - 1 - at))


def _folder(corpus: Corpus, length: int, cache: Path) -> Path:
    key = hashlib.sha256(
        f"{VERSION}/{corpus.fingerprint}/{corpus.tokens}/{length}/{RUN_POSITIONS}".encode()
    ).hexdigest()
    return cache.expanduser() / f"packed-{length}-{key[:16]}"


def _write(corpus: Corpus, length: int, folder: Path) -> None:
    """When processes race, one folder remains, and all read it."""
    first, starts, sizes = [0], list[int](), list[int]()
    for spans in packed(corpus, length):
        starts += (span.start for span in spans)
        sizes += (span.size for span in spans)
        first.append(len(starts))
    try:
        with new_folder(folder, "data.cache") as partial:
            for (name, dtype), values in zip(FIELDS.items(), (starts, sizes, first), strict=True):
                np.save(partial / f"{name}.npy", np.array(values, dtype))
    except PentadError:
        if not folder.exists():  # else another process has written it meanwhile
            raise
