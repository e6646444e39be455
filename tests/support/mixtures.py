"""Small corpora of random tokens that share a tokenizer."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from pentad.schedules.spec.data import DataSpec, Packing, SourceSpec, WeightChange
from pentad.workers.data.corpus_writer import Document, write_index, write_shard
from pentad.workers.data.tokenizer import train_tokenizer

DTYPE = np.dtype(np.uint16)


def random_corpus(folder: Path, seed: int, documents: int, longest: int, targets: float | None = None) -> str:
    """Documents of 2 to `longest` tokens, in two shards; the fraction `targets` of the tokens counts (None: no loss
    masks)."""
    folder.mkdir(parents=True)
    random = np.random.default_rng(seed)

    def document() -> Document:
        tokens = np.append(random.integers(1, 257, random.integers(1, longest)), 0).astype(DTYPE)
        mask = None if targets is None else random.random(len(tokens)) < targets
        return Document(tokens, mask if mask is None else mask.astype(np.uint8))

    shards = [write_shard(folder, number, [document() for _ in range(documents // 2)], DTYPE) for number in range(2)]
    write_index(folder, train_tokenizer(["a"], 300), shards)
    return str(folder)


def mixed(folder: Path, packing: Packing) -> DataSpec:
    """Chat data of which half of the tokens count, plain text, and a source that is soon exhausted; their weights
    change at step 2."""
    if not (folder / "chat").exists():
        random_corpus(folder / "chat", 1, 60, 12, targets=0.5)
        random_corpus(folder / "text", 2, 40, 30)
        random_corpus(folder / "few", 3, 4, 10)
    sources = (
        SourceSpec("chat", str(folder / "chat"), weight=3.0),
        SourceSpec("text", str(folder / "text"), weight=2.0),
        SourceSpec("few", str(folder / "few"), weight=1.0, epochs=1.0),
    )
    changes = (WeightChange(2, (1.0, 4.0, 1.0)),)
    return DataSpec(sources, str(folder), changes, packing, document_mask=True, eod_mask_loss=True)
