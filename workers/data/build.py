"""`pentad data build` and `pentad data inspect`: turns text into a corpus, and describes one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pentad.schedules.ir.errors import PentadError
from pentad.workers.checkpoint.atomic_io import new_folder
from pentad.workers.data.corpus import Corpus, open_corpus, read_index
from pentad.workers.data.corpus_index import plural
from pentad.workers.data.corpus_writer import write_corpus
from pentad.workers.data.samples import Windows, shuffled
from pentad.workers.data.text_sources import TextChunk, read_chunks, source_files
from pentad.workers.data.tokenizer import decode, load_tokenizer, train_tokenizer

_REPORT_EVERY = 2**26  # characters
_SHARD_FACTS = ("file", "tokens", "documents", "bytes", "checksums", "has_loss_mask")


def build_corpus(
    source: Path,
    out: Path,
    *,
    tokenizer: Path | None,
    vocab: int,
    field: str = "text",
    shard_tokens: int = 2**26,
    progress: Callable[[str], None],
) -> Corpus:
    """Builds the corpus `out` from a text, JSONL or Parquet file, or a folder of them, and opens it.

    Without a `tokenizer` file, trains one of `vocab` tokens on all of the text in a first pass. Raises PentadError for
    an unreadable or empty source and for an `out` that is not empty; `out` is left as it was.
    """
    if shard_tokens < 1:
        raise PentadError(f"shard_tokens is {shard_tokens}: expected at least 1")
    files = source_files(source)
    progress(f"{source}: {plural(len(files), 'file')}")
    with new_folder(out) as folder:
        if tokenizer is None:
            chunks = _with_progress(read_chunks(files, field), "training the tokenizer", progress)
            trained = train_tokenizer((chunk.text for chunk in chunks), vocab)
        else:
            trained = load_tokenizer(tokenizer)
        chunks = _with_progress(read_chunks(files, field), "encoding", progress)
        write_corpus(folder, chunks, trained, shard_tokens, progress)
    return open_corpus(out, verify=False, argument="OUT")


def inspect_corpus(path: Path, samples: int, length: int, seed: int) -> dict[str, Any]:
    """Verifies the corpus at `path` and describes it as plain data, with its first `samples` sequences as text.

    `length` is tokens a sequence; a corpus shorter than `length` + 1 tokens shows one shorter sequence.
    """
    corpus = open_corpus(path, verify=True, argument="PATH")
    index = read_index(path, "PATH")
    tokenizer = load_tokenizer(path / index.tokenizer.file)
    length = max(1, min(length, corpus.tokens - 1))
    windows = Windows(corpus, length).sequences if corpus.tokens > 1 else 0
    starts = [length * shuffled(n, windows, seed, corpus.fingerprint) for n in range(min(samples, windows))]
    texts = [decode(tokenizer, corpus.read(start, length + 1).tolist()) for start in starts]
    return {
        "path": str(path),
        "vocab_size": corpus.vocab_size,
        "tokens": corpus.tokens,
        "documents": corpus.documents,
        "fingerprint": corpus.fingerprint,
        "tokenizer": asdict(index.tokenizer),
        "shards": [{key: getattr(shard, key) for key in _SHARD_FACTS} for shard in index.shards],
        "samples": texts,
    }


def _with_progress(chunks: Iterable[TextChunk], phase: str, progress: Callable[[str], None]) -> Iterator[TextChunk]:
    characters = reported = 0
    for chunk in chunks:
        yield chunk
        characters += len(chunk.text)
        if characters - reported >= _REPORT_EVERY:
            progress(f"{phase}: {characters:,} characters read")
            reported = characters
