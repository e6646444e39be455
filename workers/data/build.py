"""`pentad data build` and `pentad data inspect`: turns text into a corpus, and describes one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from pentad.schedules.ir.errors import PentadError
from pentad.workers.data.corpus import Corpus, open_corpus, read_index
from pentad.workers.data.corpus_index import plural
from pentad.workers.data.corpus_writer import write_corpus
from pentad.workers.data.samples import sequence, window_count
from pentad.workers.data.text_sources import TextChunk, read_chunks, source_files
from pentad.workers.data.tokenizer import decode, load_tokenizer, train_tokenizer

_REPORT_EVERY = 2**26  # characters


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
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise _not_empty(out)
    files = source_files(source)
    progress(f"{source}: {plural(len(files), 'file')}")
    if tokenizer is None:
        chunks = _with_progress(read_chunks(files, field), "training the tokenizer", progress)
        trained = train_tokenizer((chunk.text for chunk in chunks), vocab)
    else:
        trained = load_tokenizer(tokenizer)
    try:
        write_corpus(
            out, _with_progress(read_chunks(files, field), "encoding", progress), trained, shard_tokens, progress
        )
    except OSError as error:
        if isinstance(error, FileExistsError) and out.exists():
            raise _not_empty(out) from None
        reason = error.strerror or str(error)
        raise PentadError(
            f"OUT is '{out}', which cannot be written ({reason}): expected a writable folder with free space"
        ) from None
    return open_corpus(out, verify=False, argument="OUT")


def inspect_corpus(path: Path, samples: int, length: int, seed: int) -> dict[str, Any]:
    """Verifies the corpus at `path` and describes it as plain data, with its first `samples` sequences as text.

    `length` is tokens a sequence; a corpus shorter than `length` + 1 tokens shows one shorter sequence.
    """
    corpus = open_corpus(path, verify=True, argument="PATH")
    index = read_index(path, "PATH")
    tokenizer = load_tokenizer(path / index.tokenizer_file)
    length = max(1, min(length, corpus.tokens - 1))
    count = min(samples, window_count(corpus, length)) if corpus.tokens > 1 else 0
    texts = [decode(tokenizer, sequence(corpus, seed, number, length).tolist()) for number in range(count)]
    return {
        "path": str(path),
        "vocab_size": corpus.vocab_size,
        "tokens": corpus.tokens,
        "documents": corpus.documents,
        "fingerprint": corpus.fingerprint,
        "tokenizer": {"file": index.tokenizer_file, "sha256": index.tokenizer_sha256},
        "shards": [shard._asdict() for shard in index.shards],
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


def _not_empty(out: Path) -> PentadError:
    return PentadError(f"OUT is '{out}', which exists and is not empty: expected a new or empty folder")
