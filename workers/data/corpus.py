"""A corpus of tokens on disk, memory-mapped: one flat stream of all documents, each with its end token."""

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
    """One record batch of a shard, not copied: complete documents from position `start` of the flat stream on.

    `tokens` is [T] uint16 or uint32; `offsets` is [D + 1] int64: where its D documents start, then T.
    """

    start: int
    tokens: np.ndarray
    offsets: np.ndarray


@dataclass(frozen=True)
class Corpus:
    """An open corpus: `tokens` ids below `vocab_size` in `documents` documents, mapped and not read into memory.

    `fingerprint` is the sha256 of the index, which has the checksums of all content: ranks and resumed runs compare it.
    """

    path: Path
    vocab_size: int
    tokens: int
    documents: int
    fingerprint: str
    segments: tuple[Segment, ...] = field(repr=False, compare=False)

    def read(self, start: int, count: int) -> np.ndarray:
        """Tokens `start` to `start + count` of the flat stream, [count] int64, across documents and shards."""
        parts = [segment.tokens[first:end] for segment, first, end in self._overlaps(start, count)]
        return np.concatenate([np.empty(0, np.int64), *parts], dtype=np.int64)

    def boundaries(self, start: int, count: int) -> np.ndarray:
        """Positions relative to `start`, below `count`, at which a document starts, ascending int64."""
        found = [np.empty(0, np.int64)]
        for segment, first, end in self._overlaps(start, count):
            low, high = np.searchsorted(segment.offsets[:-1], (first, end))
            found.append(segment.offsets[low:high] + (segment.start - start))
        return np.concatenate(found)

    def _overlaps(self, start: int, count: int) -> Iterator[tuple[Segment, int, int]]:
        """The segments that overlap the window, each with the first and end position inside it."""
        end = start + count
        assert 0 <= start <= end <= self.tokens, f"window {start}:{end} of {self.tokens} tokens"
        index = bisect_right(self.segments, start, key=lambda segment: segment.start) - 1
        while index < len(self.segments) and self.segments[index].start < end:
            segment = self.segments[index]
            yield segment, max(start - segment.start, 0), min(end - segment.start, len(segment.tokens))
            index += 1


def open_corpus(path: str | Path, verify: bool, argument: str = "data.path") -> Corpus:
    """Maps the corpus in folder `path`. Always checks sizes and counts, and content only with `verify`.

    `verify` reads everything once: checksums, and that token ids are below the vocabulary size. `argument` is what the
    user calls the path. Raises PentadError for a folder that is missing, foreign, empty or damaged.
    """
    path = Path(path)
    index = read_index(path, argument)
    if index.tokens == 0:
        raise PentadError(f"{argument} is '{path}', which holds 0 tokens: expected at least 1")
    if verify:
        _check_sha256(path / index.tokenizer.file, index.tokenizer.sha256)
    segments = tuple(_segments(path, index, verify))
    fingerprint = hashlib.sha256(index_text(index).encode()).hexdigest()
    return Corpus(path, index.vocab_size, index.tokens, index.documents, fingerprint, segments)


def read_index(path: Path, argument: str) -> Index:
    """The index of the corpus in folder `path`. Raises PentadError, which names `argument`, if there is none."""
    try:
        text = (path / INDEX_FILE).read_text("utf-8")
    except (OSError, UnicodeDecodeError):
        fault = f"which has no readable {INDEX_FILE}" if path.is_dir() else "which is not a folder"
        expected = "expected a corpus written by 'pentad data build'"
        raise PentadError(f"{argument} is '{path}', {fault}: {expected}") from None
    return parse_index(text, path / INDEX_FILE)


def _segments(path: Path, index: Index, verify: bool) -> Iterator[Segment]:
    start = 0
    for shard in index.shards:
        file = path / shard.file
        if not file.is_file():
            raise PentadError(f"shard {file} is missing: expected a file of {shard.bytes} bytes")
        if (found := file.stat().st_size) != shard.bytes:
            raise PentadError(f"shard {file} has {found} bytes: expected {shard.bytes} (build the corpus again)")
        if verify:
            _check_sha256(file, shard.sha256)
        for tokens, offsets in _map_shard(file, shard):
            if verify and len(tokens) and int(tokens.max()) >= index.vocab_size:
                raise PentadError(f"shard {file} holds token {tokens.max()}: expected ids below {index.vocab_size}")
            if len(tokens):
                yield Segment(start, tokens, offsets)
            start += len(tokens)


def _map_shard(file: Path, shard: Shard) -> list[tuple[np.ndarray, np.ndarray]]:
    """(tokens, offsets) of each record batch of `file`; the mapping lives as long as these arrays."""
    try:
        with pa.memory_map(str(file)) as source:
            reader = pa.ipc.open_file(source)
            columns = [reader.get_batch(i).column("tokens") for i in range(reader.num_record_batches)]
    except (pa.ArrowException, OSError, KeyError) as error:
        expected = "expected an Arrow file with a column 'tokens'"
        raise PentadError(f"shard {file} cannot be read ({error}): {expected}") from None
    types = [pa.large_list(pa.uint16()), pa.large_list(pa.uint32())]
    batches = []
    for column in filter(len, columns):
        if column.type not in types or column.null_count:
            raise PentadError(f"shard {file} holds {column.type}: expected {types[0]} or {types[1]} without nulls")
        offsets = column.offsets.to_numpy()
        batches.append((column.values.to_numpy()[offsets[0] : offsets[-1]], offsets - offsets[0]))
    tokens = sum(len(tokens) for tokens, _ in batches)
    documents = sum(len(offsets) - 1 for _, offsets in batches)
    if (tokens, documents) != (shard.tokens, shard.documents):
        expected = f"expected {shard.tokens} in {shard.documents}, as {INDEX_FILE} says"
        raise PentadError(f"shard {file} holds {tokens} tokens in {documents} documents: {expected}")
    return batches


def _check_sha256(file: Path, expected: str) -> None:
    try:
        with file.open("rb") as source:
            found = hashlib.file_digest(source, "sha256").hexdigest()
    except OSError:
        raise PentadError(f"{file} is missing: expected a file with sha256 {expected}") from None
    if found != expected:
        raise PentadError(f"{file} is damaged: sha256 is {found}: expected {expected}")
