"""A memory-mapped corpus of tokens: one flat stream of all documents, each with its end token."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pentad.schedules.ir.errors import PentadError
from pentad.schedules.ir.regular_files import expanded
from pentad.workers.data.corpus_index import CHECKED, INDEX_FILE, Index, RecordBatch, parse_index
from pentad.workers.data.shard_file import ShardFile
from pentad.workers.data.storage import Folder, folder_at

SHARDS_OPEN = 64  # mapped at a time
OFFSET, MASK = np.dtype("<i8"), np.dtype(np.uint8)


class Overlap(NamedTuple):
    """The part of a window in one record batch: the batch's tokens `first` to `end`, and where the batch starts in the
    flat stream."""

    shard: int
    batch: RecordBatch
    start: int
    first: int
    end: int


class Shards:
    """The shards of a corpus, some of them mapped, and where their record batches start in the flat stream."""

    def __init__(self, folder: Folder, index: Index, cache: Path) -> None:
        self.dtype, self.vocab_size = np.dtype(index.dtype).newbyteorder("<"), index.vocab_size
        self.files = [ShardFile(folder, shard, cache) for shard in index.shards]
        self.batches = [
            (number, batch) for number, shard in enumerate(index.shards) for batch in shard.batches if batch.tokens
        ]
        self.starts = np.fromiter(accumulate((batch.tokens for _, batch in self.batches), initial=0), np.int64)
        files = self.files  # not self: it has the cache, and a reference cycle would keep shards open
        self.map = lru_cache(SHARDS_OPEN)(lambda shard: files[shard].map())

    def overlaps(self, start: int, count: int) -> Iterator[Overlap]:
        """The record batches that overlap a window of the flat stream."""
        end = start + count
        assert 0 <= start <= end <= self.starts[-1], f"window {start}:{end} of {self.starts[-1]} tokens"
        number = int(np.searchsorted(self.starts, start, "right")) - 1
        while number < len(self.batches) and self.starts[number] < end:
            (shard, batch), at = self.batches[number], int(self.starts[number])
            yield Overlap(shard, batch, at, max(start - at, 0), min(end - at, batch.tokens))
            number += 1

    def tokens(self, part: Overlap) -> np.ndarray:
        """The tokens of a part. Raises PentadError for a token beyond the vocabulary."""
        found = self._read(part, part.batch.tokens_at, self.dtype)
        if len(found) and (largest := int(found.max())) >= self.vocab_size:
            where, expected = self.files[part.shard].name, f"expected ids below {self.vocab_size}"
            raise PentadError(f"shard {where} holds token {largest}: {expected}")
        return found

    def loss_mask(self, part: Overlap) -> np.ndarray:
        if not part.batch.loss_mask_at:
            return np.ones(part.end - part.first, MASK)
        return self._read(part, part.batch.loss_mask_at, MASK)

    def offsets(self, part: Overlap) -> np.ndarray:
        """[documents + 1]: where the record batch's documents start in it, followed by its number of tokens."""
        file, batch = self.files[part.shard], part.batch
        return file.read(self.map(part.shard), batch.offsets_at, OFFSET, batch.documents + 1)

    def _read(self, part: Overlap, column_at: int, dtype: np.dtype) -> np.ndarray:
        at, file = column_at + part.first * dtype.itemsize, self.files[part.shard]
        return file.read(self.map(part.shard), at, dtype, part.end - part.first)


@dataclass(frozen=True)
class Corpus:
    """An open corpus: `tokens` ids below `vocab_size` in `documents` documents, memory-mapped.

    `fingerprint` is the sha256 of the index, which has the checksums of all content; ranks and resumed runs compare it.
    `tokenizer` is the sha256 of the tokenizer. Reading raises PentadError for a shard that is missing or damaged.
    """

    path: Path
    vocab_size: int
    tokens: int
    documents: int
    fingerprint: str
    tokenizer: str
    has_loss_mask: bool
    shards: Shards = field(repr=False, compare=False)

    def read(self, start: int, count: int) -> np.ndarray:
        """Tokens `start` to `start + count` of the flat stream, [count] int64, across documents and shards."""
        parts = [self.shards.tokens(part) for part in self.shards.overlaps(start, count)]
        return np.concatenate([np.empty(0, np.int64), *parts], dtype=np.int64)

    def loss_mask(self, start: int, count: int) -> np.ndarray:
        """[count] bool: which of these tokens count as targets; all in a corpus without loss masks."""
        parts = [self.shards.loss_mask(part) for part in self.shards.overlaps(start, count)]
        return np.concatenate([np.empty(0, MASK), *parts]) != 0

    def boundaries(self, start: int, count: int) -> np.ndarray:
        """The positions relative to `start`, below `count`, at which a document starts; ascending int64."""
        found = [np.empty(0, np.int64)]
        for part in self.shards.overlaps(start, count):
            offsets = self.shards.offsets(part)
            low, high = np.searchsorted(offsets[:-1], (part.first, part.end))
            found.append(offsets[low:high] + (part.start - start))
        return np.concatenate(found)

    def extents(self) -> Iterator[tuple[int, int]]:
        """(start, tokens) of every document, in order."""
        for part in self.shards.overlaps(0, self.tokens):
            offsets = self.shards.offsets(part)
            offsets = offsets[: 1 + int(np.searchsorted(offsets, part.end))]
            yield from zip((offsets[:-1] + part.start).tolist(), np.diff(offsets).tolist(), strict=True)

    def verify(self) -> None:
        """Checks all shards: checksums, ids below the vocabulary size, contiguous documents. Raises PentadError."""
        shards = self.shards
        for number, file in enumerate(shards.files):
            file.check(shards.map(number), 0, -(-file.shard.bytes // CHECKED))
        for part in shards.overlaps(0, self.tokens):
            shards.tokens(part)
            offsets = shards.offsets(part)
            if offsets[0] or offsets[-1] != part.batch.tokens or np.any(np.diff(offsets) < 0):
                fault = f"shard {shards.files[part.shard].name} has other documents than {INDEX_FILE} says"
                raise PentadError(f"{fault}: expected those it was built of")


def open_corpus(
    path: str | Path, verify: bool = False, argument: str = "data.path", cache: str = "~/.cache/pentad"
) -> Corpus:
    """Opens the corpus in the folder or at the URI `path` from its index. Checks that all shards exist; their content
    is checked when it is first read, or all at once with `verify`. What is read from a remote corpus is kept in the
    folder `cache`. `argument` is the key or option that names the path to the user.

    Raises PentadError for a folder that is missing, not a corpus, empty or damaged.
    """
    folder = folder_at(path, argument)
    text = _index_text(folder, argument)
    index, fingerprint = parse_index(text, f"{folder.name}/{INDEX_FILE}"), hashlib.sha256(text.encode()).hexdigest()
    if index.tokens == 0:
        raise PentadError(f"{argument} is '{path}', which holds 0 tokens: expected at least 1")
    shards = Shards(folder, index, expanded(cache) / f"shards-{fingerprint[:16]}")
    sizes = folder.sizes()
    for file in shards.files:
        file.require_size(sizes.get(file.shard.file))
    corpus = Corpus(
        Path(path),
        index.vocab_size,
        index.tokens,
        index.documents,
        fingerprint,
        index.tokenizer.sha256,
        any(shard.has_loss_mask for shard in index.shards),
        shards,
    )
    if verify:
        _check_sha256(folder, index.tokenizer.file, index.tokenizer.sha256)
        corpus.verify()
    return corpus


def read_index(path: str | Path, argument: str) -> Index:
    """The index of the corpus in the folder `path`. Raises PentadError, naming `argument`, if there is none."""
    folder = folder_at(path, argument)
    return parse_index(_index_text(folder, argument), f"{folder.name}/{INDEX_FILE}")


def _index_text(folder: Folder, argument: str) -> str:
    try:
        return folder.read(INDEX_FILE).decode("utf-8")
    except (PentadError, UnicodeDecodeError) as error:
        if folder.filesystem is not None:
            fault = f"which cannot be read ({error})"
        else:
            fault = f"which has no readable {INDEX_FILE}" if os.path.isdir(folder.path) else "which is not a folder"
        expected = "expected a corpus written by 'pentad data build'"
        raise PentadError(f"{argument} is '{folder.name}', {fault}: {expected}") from None


def _check_sha256(folder: Folder, file: str, expected: str) -> None:
    if (found := hashlib.sha256(folder.read(file)).hexdigest()) != expected:
        raise PentadError(f"{folder.name}/{file} is damaged: sha256 is {found}: expected {expected}")
