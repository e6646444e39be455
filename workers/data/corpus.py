"""A corpus of tokens on disk, read through memory maps: the flat stream of all documents, each with its end token."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from pentad.schedules.ir.errors import PentadError
from pentad.workers.data.corpus_index import INDEX_FILE, Index, Shard, index_text, parse_index


class Segment(NamedTuple):
    """One record batch of a shard, without a copy: whole documents that begin at flat position `start`.

    `tokens` [T] uint16 or uint32 are its flat tokens; `offsets` [D+1] int64 are where its D documents begin, then T.
    """

    start: int
    tokens: np.ndarray
    offsets: np.ndarray


@dataclass(frozen=True)
class Corpus:
    """An open corpus: `tokens` ids below `vocab_size` in `documents` documents, mapped and not read into memory.

    `fingerprint` is the sha256 of the index, hence of all content: ranks and resumed runs compare it.
    """

    path: Path
    vocab_size: int
    tokens: int
    documents: int
    fingerprint: str
    segments: tuple[Segment, ...] = field(repr=False, compare=False)

    def read(self, start: int, count: int) -> np.ndarray:
        """Flat tokens `start` to `start + count`, as [count] int64, across documents and shards."""
        parts = [segment.tokens[first:last] for segment, first, last in self._parts(start, count)]
        return np.concatenate([np.empty(0, np.int64), *parts], dtype=np.int64)

    def boundaries(self, start: int, count: int) -> np.ndarray:
        """Positions within the window `start` to `start + count` at which a document begins, [B] int64 ascending."""
        begins = [np.empty(0, np.int64)]
        for segment, first, last in self._parts(start, count):
            low, high = np.searchsorted(segment.offsets[:-1], (first, last))
            begins.append(segment.offsets[low:high] + (segment.start - start))
        return np.concatenate(begins)

    def _parts(self, start: int, count: int) -> Iterator[tuple[Segment, int, int]]:
        """The segments that the window meets, each with the first and last (excluded) position inside it."""
        end = start + count
        assert 0 <= start <= end <= self.tokens, f"window {start}:{end} of {self.tokens} tokens"
        at = bisect_right(self.segments, start, key=lambda segment: segment.start) - 1
        while at < len(self.segments) and self.segments[at].start < end:
            segment = self.segments[at]
            yield segment, max(start - segment.start, 0), min(end - segment.start, len(segment.tokens))
            at += 1


def open_corpus(path: str | Path, verify: bool, argument: str = "data.path") -> Corpus:
    """Maps the corpus in folder `path`. Sizes and counts are always checked, content only with `verify`.

    `verify` reads everything once: each checksum, and that each token id is below the vocabulary's size. `argument`
    is what the user's mistake is called. Raises PentadError for a folder that is missing, foreign, empty or damaged.
    """
    path = Path(path)
    index = read_index(path, argument)
    if index.tokens == 0:
        raise PentadError(f"{argument} is '{path}', which holds 0 tokens; expected at least 1")
    if verify:
        _check_sum(path / index.tokenizer_file, index.tokenizer_sha256)
    segments = tuple(_segments(path, index, verify))
    fingerprint = hashlib.sha256(index_text(index).encode()).hexdigest()
    return Corpus(path, index.vocab_size, index.tokens, index.documents, fingerprint, segments)


def read_index(path: Path, argument: str) -> Index:
    """The index of the corpus in folder `path`. Raises PentadError, naming `argument`, if it has none of ours."""
    expected = "expected a corpus written by 'pentad data build'"
    if not path.is_dir():
        raise PentadError(f"{argument} is '{path}', which is no folder; {expected}")
    try:
        text = (path / INDEX_FILE).read_text("utf-8")
    except (OSError, UnicodeDecodeError):
        raise PentadError(f"{argument} is '{path}', which holds no readable {INDEX_FILE}; {expected}") from None
    return parse_index(text, path / INDEX_FILE)


def _segments(path: Path, index: Index, verify: bool) -> Iterator[Segment]:
    start = 0
    for shard in index.shards:
        file = path / shard.file
        found = file.stat().st_size if file.is_file() else None
        if found is None:
            raise PentadError(f"shard {file} is missing: expected a file of {shard.bytes} bytes")
        if found != shard.bytes:
            raise PentadError(f"shard {file} has {found} bytes: expected {shard.bytes}: build the corpus again")
        if verify:
            _check_sum(file, shard.sha256)
        for tokens, offsets in _map(file, shard):
            if verify and len(tokens) and int(tokens.max()) >= index.vocab_size:
                raise PentadError(f"shard {file} holds token {tokens.max()}: expected ids below {index.vocab_size}")
            if len(tokens):
                yield Segment(start, tokens, offsets)
            start += len(tokens)


def _map(file: Path, shard: Shard) -> list[tuple[np.ndarray, np.ndarray]]:
    """Flat tokens and offsets of each record batch of `file`; the mapping lives as long as the arrays do."""
    try:
        with pa.memory_map(str(file)) as source:
            reader = pa.ipc.open_file(source)
            columns = [reader.get_batch(i).column("tokens") for i in range(reader.num_record_batches)]
    except (pa.ArrowException, OSError, KeyError) as error:
        raise PentadError(
            f"shard {file} is unreadable ({error}): expected an Arrow file with a column 'tokens'"
        ) from None
    expected = [pa.large_list(pa.uint16()), pa.large_list(pa.uint32())]
    batches = []
    for column in filter(len, columns):
        if column.type not in expected or column.null_count:
            raise PentadError(
                f"shard {file} holds {column.type}: expected {expected[0]} or {expected[1]} without nulls"
            )
        offsets = column.offsets.to_numpy()
        batches.append((column.values.to_numpy()[offsets[0] : offsets[-1]], offsets - offsets[0]))
    found = (sum(len(tokens) for tokens, _ in batches), sum(len(offsets) - 1 for _, offsets in batches))
    if found != (shard.tokens, shard.documents):
        raise PentadError(
            f"shard {file} holds {found[0]} tokens in {found[1]} documents: expected {shard.tokens} in {shard.documents}"
        )
    return batches


def _check_sum(file: Path, expected: str) -> None:
    try:
        with file.open("rb") as source:
            found = hashlib.file_digest(source, "sha256").hexdigest()
    except OSError:
        raise PentadError(f"{file} is missing: expected a file with sha256 {expected}") from None
    if found != expected:
        raise PentadError(f"{file} is corrupt: its sha256 is {found}: expected {expected}")
