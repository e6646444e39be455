"""Corpora for tests: built in this process unless told otherwise, and read back as text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from pentad.workers.data.corpus import Corpus
from pentad.workers.data.corpus_writer import write_index, write_shards
from pentad.workers.data.encoder import Encoder, TextChunk
from pentad.workers.data.tokenizer import decode, end_token, load_tokenizer
from pentad.workers.preprocess.build import BuildProgress, BuildRequest, build_corpus


def build(
    source: Path | str,
    note: Callable[[str], None] = lambda line: None,
    progress: Callable[[BuildProgress], None] = lambda progress: None,
    **options: Any,
) -> Corpus:
    """The corpus of a source, in the folder `out` beside it, with a tokenizer of 300 tokens, unless one is given."""
    options = {"vocab": None if options.get("tokenizer") else 300} | options
    request = BuildRequest((str(source),), Path(source).parent / "out", workers=1)
    return build_corpus(replace(request, **options), note, progress)


def write_corpus(folder: Path, documents: list[str], tokenizer: Tokenizer, shard_tokens: int = 2**26) -> None:
    """Writes a corpus of these documents to `folder`, which exists."""
    encoder = Encoder(tokenizer, end_token(tokenizer))
    encoded = encoder.documents(TextChunk(document, True) for document in documents)
    shards = write_shards(folder, encoded, encoder.dtype, shard_tokens)
    write_index(folder, tokenizer, shards)


def texts(corpus: Corpus) -> list[str]:
    """The text of each document, without its end token."""
    tokenizer = load_tokenizer(corpus.path)
    return [decode(tokenizer, tokens[:-1]) for tokens in documents(corpus)]


def documents(corpus: Corpus) -> list[list[int]]:
    """The tokens of each document."""
    starts = [*corpus.boundaries(0, corpus.tokens).tolist(), corpus.tokens]
    return [corpus.read(first, last - first).tolist() for first, last in pairwise(starts)]


def content(folder: Path) -> dict[str, bytes]:
    """Every file of a folder, by its relative path."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
