"""`pentad data inspect`: verifies a corpus and describes it."""

from __future__ import annotations

from dataclasses import asdict
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from pentad.workers.data.corpus import Corpus, open_corpus, read_index
from pentad.workers.data.storage import folder_at
from pentad.workers.data.tokenizer import decode, parse_tokenizer

_SEARCHED = 2**20  # tokens searched for a document start, and read at a time
_SHARD_FACTS = ("file", "tokens", "documents", "bytes", "checksums", "has_loss_mask")


def inspect_corpus(path: str | Path, samples: int, length: int) -> dict[str, Any]:
    """Verifies the corpus at `path` and describes it as plain data.

    Includes up to `length` tokens of up to `samples` documents, evenly spread, as text segments that are either trained
    or not. Raises PentadError for a corpus that is missing or damaged.
    """
    corpus = open_corpus(path, verify=True, argument="PATH")
    index = read_index(path, "PATH")
    tokenizer = parse_tokenizer(folder_at(path, "PATH").read(index.tokenizer.file).decode())
    places = (corpus.tokens * number // samples for number in range(samples))
    starts = dict.fromkeys(start for place in places for start in _document_start(corpus, place))
    return {
        "path": str(path),
        "vocab_size": corpus.vocab_size,
        "tokens": corpus.tokens,
        "trained_tokens": _trained_tokens(corpus),
        "documents": corpus.documents,
        "lengths": length_histogram(np.fromiter((tokens for _, tokens in corpus.extents()), np.int64)),
        "fingerprint": corpus.fingerprint,
        "tokenizer": asdict(index.tokenizer),
        "origin": asdict(index.origin),
        "shards": [{key: getattr(shard, key) for key in _SHARD_FACTS} for shard in index.shards],
        "samples": [_segments(corpus, tokenizer, start, length) for start in starts],
    }


def length_histogram(lengths: np.ndarray) -> list[dict[str, int]]:
    """A histogram of document `lengths` in tokens, [documents] int64: how many documents have `shortest` to `longest`
    tokens, and how many tokens they have. `longest` is a power of two; the first and last bins are not empty."""
    last = np.maximum(np.ceil(np.log2(np.maximum(lengths, 1))), 0).astype(np.int64)  # a bin's longest is 2^last
    documents, tokens = np.bincount(last), np.bincount(last, lengths).astype(np.int64)
    return [
        {
            "shortest": 2 ** (power - 1) + 1 if power else 0,
            "longest": 2**power,
            "documents": int(documents[power]),
            "tokens": int(tokens[power]),
        }
        for power in range(int(last.min()) if len(last) else 0, len(documents))
    ]


def _document_start(corpus: Corpus, place: int) -> list[int]:
    """The first position at or soon after `place` at which a document starts; [] if there is none."""
    found = corpus.boundaries(place, min(_SEARCHED, corpus.tokens - place))
    return [place + int(start) for start in found[:1]]


def _trained_tokens(corpus: Corpus) -> int:
    if not corpus.has_loss_mask:
        return corpus.tokens
    starts = range(0, corpus.tokens, _SEARCHED)
    return sum(int(corpus.loss_mask(start, min(_SEARCHED, corpus.tokens - start)).sum()) for start in starts)


def _segments(corpus: Corpus, tokenizer: Tokenizer, start: int, length: int) -> list[dict[str, Any]]:
    following = corpus.boundaries(start + 1, min(length, corpus.tokens - start) - 1)
    count = int(following[0]) + 1 if len(following) else min(length, corpus.tokens - start)
    ids, mask = corpus.read(start, count).tolist(), corpus.loss_mask(start, count).tolist()
    runs = groupby(zip(ids, mask, strict=True), key=itemgetter(1))
    return [{"text": decode(tokenizer, [token for token, _ in run]), "trained": trained} for trained, run in runs]
