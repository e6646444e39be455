"""Writes a corpus: encodes pieces of documents, fills Arrow shards, and shows the folder only when it is complete."""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pyarrow as pa
from tokenizers import Tokenizer

from pentad.schedules.ir.errors import PentadError
from pentad.workers.checkpoint.atomic_io import sync_folder, write_file
from pentad.workers.data.corpus_index import INDEX_FILE, TOKENIZER_FILE, Index, Shard, index_text
from pentad.workers.data.text_sources import Piece
from pentad.workers.data.tokenizer import encode, end_token, vocab_size

_ENCODED_AT_ONCE = 2**21  # characters; the tokenizer needs some 100 bytes a token meanwhile
_BATCH_TOKENS = 2**22


def write_corpus(
    out: Path, pieces: Iterable[Piece], tokenizer: Tokenizer, shard_tokens: int, progress: Callable[[str], None]
) -> None:
    """Writes the documents as the corpus `out`, which must be absent or an empty folder.

    Everything is written in a hidden folder beside `out` that is renamed at the end, so `out` is whole or not there;
    a failure leaves nothing. Memory: one document's token ids and one record batch. A shard exceeds `shard_tokens`
    only for a longer document. Raises FileExistsError if another process wrote `out` first, PentadError if there is
    no text.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    staging = out.parent / f".{out.name}.{secrets.token_hex(8)}"
    staging.mkdir()
    try:
        _write_files(staging, pieces, tokenizer, shard_tokens, progress)
        _publish(staging, out)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _write_files(
    folder: Path, pieces: Iterable[Piece], tokenizer: Tokenizer, shard_tokens: int, progress: Callable[[str], None]
) -> None:
    size = vocab_size(tokenizer)
    dtype = np.dtype(np.uint16 if size <= 2**16 else np.uint32)
    shards: list[Shard] = []
    for documents in _shards(_documents(pieces, tokenizer, dtype), shard_tokens):
        shards.append(_write_shard(folder, len(shards), documents, dtype))
        progress(f"{shards[-1].file}: {shards[-1].tokens} tokens in {shards[-1].documents} documents")
    if not shards:
        raise PentadError("SOURCE holds no text: expected at least one character")
    text = tokenizer.to_str(pretty=True).encode()
    write_file(folder / TOKENIZER_FILE, [memoryview(text)])
    tokens, documents_found = sum(shard.tokens for shard in shards), sum(shard.documents for shard in shards)
    index = Index(size, tokens, documents_found, TOKENIZER_FILE, hashlib.sha256(text).hexdigest(), tuple(shards))
    write_file(folder / INDEX_FILE, [memoryview(index_text(index).encode())])


def _documents(pieces: Iterable[Piece], tokenizer: Tokenizer, dtype: np.dtype) -> Iterator[np.ndarray]:
    """Each document's token ids with its end token."""
    end = np.array([end_token(tokenizer)], dtype)
    parts: list[np.ndarray] = []
    for group in _groups(pieces):
        for piece, ids in zip(group, encode(tokenizer, [piece.text for piece in group]), strict=True):
            parts.append(np.array(ids, dtype))
            if piece.last:
                document = np.concatenate([*parts, end])
                parts = []
                yield document


def _groups(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    group: list[Piece] = []
    characters = 0
    for piece in pieces:
        group.append(piece)
        characters += len(piece.text)
        if characters >= _ENCODED_AT_ONCE:
            yield group
            group, characters = [], 0
    if group:
        yield group


def _shards(documents: Iterator[np.ndarray], limit: int) -> Iterator[Iterator[np.ndarray]]:
    """Runs of documents of at most `limit` tokens; each run has to be read to its end before the next."""
    following = next(documents, None)

    def run() -> Iterator[np.ndarray]:
        nonlocal following
        room = limit
        while following is not None and (room == limit or len(following) <= room):
            room -= len(following)
            yield following
            following = next(documents, None)

    while following is not None:
        yield run()


def _write_shard(folder: Path, number: int, documents: Iterator[np.ndarray], dtype: np.dtype) -> Shard:
    file = folder / f"tokens-{number:05d}.arrow"
    kind = pa.large_list(pa.from_numpy_dtype(dtype))
    tokens = rows = 0
    with _durable(file) as sink, pa.ipc.new_file(sink, pa.schema([("tokens", kind)])) as writer:
        for batch in _batches(documents):
            offsets = np.concatenate([[0], np.cumsum([len(document) for document in batch])]).astype(np.int64)
            column = pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(np.concatenate(batch)))
            writer.write_batch(pa.record_batch([column], names=["tokens"]))
            tokens, rows = tokens + int(offsets[-1]), rows + len(batch)
    with file.open("rb") as source:
        checksum = hashlib.file_digest(source, "sha256").hexdigest()
    return Shard(file.name, tokens, rows, file.stat().st_size, checksum)


def _batches(documents: Iterator[np.ndarray]) -> Iterator[list[np.ndarray]]:
    batch: list[np.ndarray] = []
    tokens = 0
    for document in documents:
        batch.append(document)
        tokens += len(document)
        if tokens >= _BATCH_TOKENS:
            yield batch
            batch, tokens = [], 0
    if batch:
        yield batch


@contextmanager
def _durable(file: Path) -> Iterator[BinaryIO]:
    """A file that is on disk when the block ends."""
    with file.open("wb") as sink:
        yield sink
        sink.flush()
        os.fsync(sink.fileno())


def _publish(staging: Path, out: Path) -> None:
    sync_folder(staging)
    try:
        os.rename(staging, out)
    except OSError as error:
        if out.exists():
            raise FileExistsError(f"{out} exists") from error
        raise
    sync_folder(out.parent)
