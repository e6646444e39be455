"""Writes a corpus: encodes document chunks into Arrow shards, and an index of them last."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, TypeVar

import numpy as np
import pyarrow as pa
from tokenizers import Tokenizer

from pentad.schedules.ir.errors import PentadError
from pentad.workers.checkpoint.atomic_io import write_file
from pentad.workers.data.corpus_index import INDEX_FILE, TOKENIZER_FILE, Index, Shard, TokenizerFile, index_text, plural
from pentad.workers.data.text_sources import TextChunk
from pentad.workers.data.tokenizer import encode, end_token, vocab_size

_ENCODED_AT_ONCE = 2**21  # characters; encoding needs about 100 bytes a token meanwhile
_BATCH_TOKENS = 2**22

T = TypeVar("T")


def write_corpus(
    folder: Path, chunks: Iterable[TextChunk], tokenizer: Tokenizer, shard_tokens: int, progress: Callable[[str], None]
) -> None:
    """Writes the documents and the tokenizer to `folder`, which exists and is empty.

    Holds one document's token ids and one record batch in memory. A shard exceeds `shard_tokens` only if a single
    document does. Raises PentadError if there is no text, and OSError.
    """
    size = vocab_size(tokenizer)
    dtype = np.dtype(np.uint16 if size <= 2**16 else np.uint32)
    shards: list[Shard] = []
    for documents in _split_by_tokens(_encoded_documents(chunks, tokenizer, dtype), shard_tokens):
        shard = _write_shard(folder, len(shards), documents, dtype)
        progress(f"{shard.file}: {plural(shard.tokens, 'token')} in {plural(shard.documents, 'document')}")
        shards.append(shard)
    if not shards:
        raise PentadError("SOURCE holds no text: expected at least one character")
    text = tokenizer.to_str(pretty=True).encode()
    write_file(folder / TOKENIZER_FILE, [memoryview(text)])
    index = Index(
        vocab_size=size,
        tokens=sum(shard.tokens for shard in shards),
        documents=sum(shard.documents for shard in shards),
        tokenizer=TokenizerFile(TOKENIZER_FILE, hashlib.sha256(text).hexdigest()),
        shards=tuple(shards),
    )
    write_file(folder / INDEX_FILE, [memoryview(index_text(index).encode())])


def _encoded_documents(chunks: Iterable[TextChunk], tokenizer: Tokenizer, dtype: np.dtype) -> Iterator[np.ndarray]:
    """Each document's token ids with its end token."""
    end = np.array([end_token(tokenizer)], dtype)
    parts: list[np.ndarray] = []
    for group in _grouped(chunks, lambda chunk: len(chunk.text), _ENCODED_AT_ONCE):
        for chunk, ids in zip(group, encode(tokenizer, [chunk.text for chunk in group]), strict=True):
            parts.append(np.array(ids, dtype))
            if chunk.last:
                document = np.concatenate([*parts, end])
                parts = []
                yield document


def _grouped(items: Iterable[T], size: Callable[[T], int], limit: int) -> Iterator[list[T]]:
    """Consecutive items in lists; each is closed when its total size reaches `limit`."""
    group: list[T] = []
    total = 0
    for item in items:
        group.append(item)
        total += size(item)
        if total >= limit:
            yield group
            group, total = [], 0
    if group:
        yield group


def _split_by_tokens(documents: Iterator[np.ndarray], limit: int) -> Iterator[Iterator[np.ndarray]]:
    """Runs of documents of at most `limit` tokens; read each run to its end before the next."""
    pending = next(documents, None)

    def run() -> Iterator[np.ndarray]:
        nonlocal pending
        room = limit
        while pending is not None and (room == limit or len(pending) <= room):
            room -= len(pending)
            yield pending
            pending = next(documents, None)

    while pending is not None:
        yield run()


def _write_shard(folder: Path, number: int, documents: Iterator[np.ndarray], dtype: np.dtype) -> Shard:
    file = folder / f"tokens-{number:05d}.arrow"
    kind = pa.large_list(pa.from_numpy_dtype(dtype))
    tokens = rows = 0
    with _durable(file) as sink, pa.ipc.new_file(sink, pa.schema([("tokens", kind)])) as writer:
        for batch in _grouped(documents, len, _BATCH_TOKENS):
            offsets = np.concatenate([[0], np.cumsum([len(document) for document in batch])]).astype(np.int64)
            column = pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(np.concatenate(batch)))
            writer.write_batch(pa.record_batch([column], names=["tokens"]))
            tokens, rows = tokens + int(offsets[-1]), rows + len(batch)
    with file.open("rb") as source:
        checksum = hashlib.file_digest(source, "sha256").hexdigest()
    return Shard(file.name, tokens, rows, file.stat().st_size, checksum)


@contextmanager
def _durable(file: Path) -> Iterator[BinaryIO]:
    """A file that is on disk when the block ends."""
    with file.open("wb") as sink:
        yield sink
        sink.flush()
        os.fsync(sink.fileno())
