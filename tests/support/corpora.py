"""Small corpora of random tokens that share a tokenizer."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from pentad.workers.data.corpus_writer import Document, write_index, write_shard
from pentad.workers.data.tokenizer import train_tokenizer

DTYPE = np.dtype(np.uint16)


def random_corpus(folder: Path, seed: int, documents: int, longest: int, targets: float | None = None) -> str:
    """Documents of 2 to `longest` tokens, in two shards; the share `targets` of them counts, None: no loss masks."""
    folder.mkdir(parents=True)
    random = np.random.default_rng(seed)

    def document() -> Document:
        tokens = np.append(random.integers(1, 257, random.integers(1, longest)), 0).astype(DTYPE)
        mask = None if targets is None else random.random(len(tokens)) < targets
        return Document(tokens, mask if mask is None else mask.astype(np.uint8))

    shards = [write_shard(folder, number, [document() for _ in range(documents // 2)], DTYPE) for number in range(2)]
    write_index(folder, train_tokenizer(["a"], 300), shards)
    return str(folder)
