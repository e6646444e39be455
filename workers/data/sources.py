"""Finds the corpus that `data.path` names. Imports no torch: the driver looks before it starts anything."""

from __future__ import annotations

from pathlib import Path

from pentad.schedules.ir.errors import PentadError
from pentad.workers.data.builtin import builtin_corpus
from pentad.workers.data.corpus import Corpus, open_corpus
from pentad.workers.data.samples import window_count

BUILTIN_VOCAB = 4096  # as much as half a megabyte of text can teach


def open_data(data: str, vocab: int, length: int, cache: str, *, verify: bool = False, fingerprint: str = "") -> Corpus:
    """The corpus in a folder, or of `builtin:NAME`, which is built in the folder `cache` on first use.

    `verify` reads it all and compares checksums; `fingerprint` is the one it must have. Raises PentadError when it is
    missing, damaged, another one, shorter than one sequence of `length`, or has more tokens than a model of `vocab`.
    """
    kind, _, name = data.partition("builtin:")
    builtin = bool(name) and not kind
    folder = (
        builtin_corpus(name, min(vocab, BUILTIN_VOCAB), Path(cache).expanduser())
        if builtin
        else Path(data).expanduser()
    )
    corpus = open_corpus(folder, verify)
    if corpus.vocab_size > vocab:
        raise PentadError(
            f"model.vocab is {vocab}: expected at least {corpus.vocab_size}, the tokens of data.path {data}"
        )
    if fingerprint:
        check_same(data, corpus.fingerprint, fingerprint)
    window_count(corpus, length)
    return corpus


def check_same(data: str, found: str, expected: str) -> None:
    """Raises PentadError when a corpus is not the one that a run began with, or that its other ranks read."""
    if found != expected:
        raise PentadError(
            f"data.path is {data}, a corpus of fingerprint {found[:12]}: expected {expected[:12]} as before"
        )
