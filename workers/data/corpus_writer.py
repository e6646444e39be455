"""Writes a corpus: Arrow shards of documents, and their index last."""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import BinaryIO, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa
from tokenizers import Tokenizer

from pentad.workers.checkpoint.atomic_io import write_file
from pentad.workers.data.corpus_index import (
    CHECKED,
    INDEX_FILE,
    PLAIN,
    TOKENIZER_FILE,
    Index,
    Origin,
    RecordBatch,
    Shard,
    TokenizerFile,
    checksum_file,
    index_text,
)
from pentad.workers.data.tokenizer import tokenizer_text, vocab_size

_BATCH_TOKENS = 2**22

T = TypeVar("T")


class Document(NamedTuple):
    """`tokens` [T] are ids, including the end token. `loss_mask` [T] uint8 is 1 where a token counts as a target;
    without it, all tokens count."""

    tokens: np.ndarray
    loss_mask: np.ndarray | None = None


def write_shards(folder: Path, documents: Iterable[Document], dtype: np.dtype, shard_tokens: int) -> tuple[Shard, ...]:
    """Writes the documents to shards in `folder`, numbered from 0, holding one record batch in memory at a time.

    A shard exceeds `shard_tokens` only if a single document does. Raises OSError.
    """
    runs = enumerate(_split_by_tokens(iter(documents), shard_tokens))
    return tuple(write_shard(folder, number, run, dtype) for number, run in runs)


def write_index(folder: Path, tokenizer: Tokenizer, shards: Sequence[Shard]) -> None:
    """Completes a corpus of these shards: writes the tokenizer and, last, the index. Raises OSError."""
    text = tokenizer_text(tokenizer).encode()
    write_file(folder / TOKENIZER_FILE, [memoryview(text)])
    file = TokenizerFile(TOKENIZER_FILE, hashlib.sha256(text).hexdigest())
    index = index_of(file, vocab_size(tokenizer), shards, PLAIN)
    write_file(folder / INDEX_FILE, [memoryview(index_text(index).encode())])


def index_of(tokenizer: TokenizerFile, vocab: int, shards: Sequence[Shard], origin: Origin) -> Index:
    """The index of a corpus of these shards; token ids are below `vocab`."""
    return Index(
        vocab_size=vocab,
        dtype=token_dtype(vocab).name,
        tokens=sum(shard.tokens for shard in shards),
        documents=sum(shard.documents for shard in shards),
        tokenizer=tokenizer,
        origin=origin,
        shards=tuple(shards),
    )


def token_dtype(vocab: int) -> np.dtype:
    """The dtype in which token ids of a vocabulary are stored."""
    return np.dtype(np.uint16 if vocab <= 2**16 else np.uint32)


def _grouped(items: Iterable[T], size: Callable[[T], int], limit: int) -> Iterator[list[T]]:
    """Consecutive items in lists; a list ends once its total size reaches `limit`."""
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


def _split_by_tokens(documents: Iterator[Document], limit: int) -> Iterator[Iterator[Document]]:
    """Runs of documents with at most `limit` tokens, or of one longer document; read each run to its end before the
    next."""
    pending = next(documents, None)

    def run() -> Iterator[Document]:
        nonlocal pending
        room = limit
        while pending is not None and (room == limit or len(pending.tokens) <= room):
            room -= len(pending.tokens)
            yield pending
            pending = next(documents, None)

    while pending is not None:
        yield run()


def write_shard(folder: Path, number: int, documents: Iterable[Document], dtype: np.dtype) -> Shard:
    """Writes shard `number` of a corpus, with its checksums, durably; token ids are stored as `dtype`.

    Holds one record batch in memory at a time. Either all documents have a loss mask or none has. Raises OSError.
    """
    file, layout = folder / f"tokens-{number:05d}.arrow", list[RecordBatch]()
    batches = _grouped(documents, lambda document: len(document.tokens), _BATCH_TOKENS)
    first = next(batches, None)
    names = ("tokens", "loss_mask") if first and first[0].loss_mask is not None else ("tokens",)
    types = {"tokens": pa.from_numpy_dtype(dtype), "loss_mask": pa.uint8()}
    schema = pa.schema([(name, pa.large_list(types[name])) for name in names])
    with _durable(file) as sink, pa.ipc.new_file(sink, schema) as writer:
        for batch in () if first is None else chain([first], batches):
            writer.write_batch(_record_batch(batch, schema))
    with pa.memory_map(str(file)) as source:
        base, reader = source.read_buffer().address, pa.ipc.open_file(source)
        layout += (_layout(reader.get_batch(i), base) for i in range(reader.num_record_batches))
    checksums = _checksums(file)
    with _durable(folder / checksum_file(file.name)) as sink:
        sink.write(checksums)
    return Shard(
        file.name,
        sum(batch.tokens for batch in layout),
        sum(batch.documents for batch in layout),
        file.stat().st_size,
        hashlib.sha256(checksums).hexdigest(),
        tuple(layout),
    )


def _record_batch(documents: list[Document], schema: pa.Schema) -> pa.RecordBatch:
    offsets = pa.array(np.cumsum([0, *(len(document.tokens) for document in documents)]), pa.int64())
    columns = []
    for field in schema:
        values = np.concatenate([getattr(document, field.name) for document in documents])
        assert len(values) == offsets[-1].as_py(), f"{field.name} of another length than the tokens"
        columns.append(pa.LargeListArray.from_arrays(offsets, pa.array(values, field.type.value_type)))
    return pa.record_batch(columns, schema=schema)


def _layout(batch: pa.RecordBatch, base: int) -> RecordBatch:
    """Where the columns of a mapped record batch are; the mapping starts at the address `base`."""
    columns = [batch.column(name) for name in batch.schema.names]
    offsets, (tokens_at, *mask_at) = columns[0].offsets, (column.values.buffers()[1].address for column in columns)
    return RecordBatch(
        offsets[-1].as_py(),
        len(batch),
        tokens_at - base,
        offsets.buffers()[1].address - base,
        mask_at[0] - base if mask_at else 0,
    )


def _checksums(file: Path) -> bytes:
    """The CRC-32 of every block of a file, little-endian uint32."""
    with file.open("rb") as source:
        blocks = iter(partial(source.read, CHECKED), b"")
        return np.array([zlib.crc32(block) for block in blocks], "<u4").tobytes()


@contextmanager
def _durable(file: Path) -> Iterator[BinaryIO]:
    """A file to write, synced to disk at the end of the block."""
    with file.open("wb") as sink:
        yield sink
        sink.flush()
        os.fsync(sink.fileno())
