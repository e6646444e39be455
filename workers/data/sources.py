"""Opens the corpus that `data.path` names: a folder, or `builtin:NAME`, text that every Python installation has.

Imports no torch: the driver checks the data before it starts anything.
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Callable
from pathlib import Path
from pydoc_data.topics import topics

from pentad.schedules.ir.errors import PentadError
from pentad.schedules.spec.eval_spec import EvalData
from pentad.workers.checkpoint.atomic_io import new_folder
from pentad.workers.data.corpus import Corpus, open_corpus
from pentad.workers.data.corpus_index import INDEX_FILE, VERSION, require_vocab
from pentad.workers.data.holdout import Part, evaluation_part, training_part
from pentad.workers.data.samples import window_count

_BUILTIN_VOCAB = 4096  # half a megabyte of text does not train more tokens well
_SHARD_TOKENS = 2**26
_VERIFIED_TOKENS = 2**28  # checked within a second; what is larger is checked when it is read
# pydoc: Python's language reference as `help()` shows it, 80 topics, 0.5 MB of English.
_TEXTS: dict[str, Callable[[], list[str]]] = {"pydoc": lambda: [topics[name] for name in sorted(topics)]}


def open_data(
    data: str,
    vocab: int,
    length: int,
    cache: str,
    *,
    verify: bool = False,
    fingerprint: str = "",
    holdout: float = 0.0,
    argument: str = "data.path",
) -> Corpus:
    """Opens the corpus `data`, building a built-in one below the folder `cache` on first use.

    `verify` checks the content of a small corpus too, before a rank reads it; `fingerprint` is the expected one. The
    share `holdout` of it is left out. `argument` is what the user calls it. Raises PentadError for a corpus that is
    missing, damaged, another one than expected, shorter than one sequence of `length` tokens, or with more token ids
    than a model of `vocab` has.
    """
    corpus = open_corpus(corpus_folder(data, vocab, cache), argument=argument)
    if verify and corpus.tokens <= _VERIFIED_TOKENS:
        corpus.verify()
    if corpus.vocab_size > vocab:
        raise PentadError(f"model.vocab is {vocab}: expected at least {corpus.vocab_size}, the vocabulary of {data}")
    if fingerprint:
        require_fingerprint(data, corpus.fingerprint, fingerprint)
    corpus = training_part(corpus, holdout)
    window_count(corpus, length, argument)
    return corpus


def open_eval_data(
    data_set: EvalData, vocab: int, length: int, cache: str, *, verify: bool = False, argument: str = "eval.data"
) -> Part:
    """What a data set is evaluated on. Raises PentadError as `open_data` does."""
    fingerprint = data_set.fingerprint
    corpus = open_data(data_set.data, vocab, length, cache, verify=verify, fingerprint=fingerprint, argument=argument)
    part = evaluation_part(corpus, data_set.holdout)
    if not part.windows(length):
        found = f"which holds {part.end - part.first} tokens of '{corpus.path}' out"
        expected = f"a share of at least {length + 1} (batch.sequence_length + 1)"
        raise PentadError(f"data.holdout is {data_set.holdout:g}, {found}: expected {expected}")
    return part


def require_fingerprint(data: str, found: str, expected: str) -> None:
    """Raises PentadError if a corpus is not the one the run started with, or that its other ranks read."""
    if found != expected:
        fault = f"which has fingerprint {found[:12]}"
        raise PentadError(f"data.path is {data}, {fault}: expected {expected[:12]}, the corpus the run started with")


def corpus_folder(data: str, vocab: int, cache: str) -> Path:
    """The folder of the corpus `data`. A built-in one is built first if need be, with at most `vocab` tokens."""
    if data.startswith("builtin:"):
        return builtin_corpus(data.removeprefix("builtin:"), vocab, Path(cache))
    return Path(data).expanduser()


def check_data(data: str, vocab: int, length: int, cache: str) -> None:
    """Raises PentadError as `open_data` does, but neither builds a built-in corpus nor reads tokens."""
    if data.startswith("builtin:"):
        require_vocab(vocab, "model.vocab")
        folder, _ = _builtin_folder(data.removeprefix("builtin:"), vocab, Path(cache))
        if not (folder / INDEX_FILE).exists():
            return
    open_data(data, vocab, length, cache)


def _builtin_folder(name: str, vocab: int, cache: Path) -> tuple[Path, list[str]]:
    """Where a built-in corpus is or would be, and its documents. Raises PentadError for an unknown name."""
    if name not in _TEXTS:
        known = ", ".join(f"builtin:{known}" for known in _TEXTS)
        raise PentadError(f"data.path is builtin:{name}: expected one of {known}")
    documents = _TEXTS[name]()
    digest = hashlib.sha256("\0".join([str(VERSION), *documents]).encode()).hexdigest()
    size = min(vocab, _BUILTIN_VOCAB)
    return cache.expanduser() / f"{name}-{size}-python{platform.python_version()}-{digest[:16]}", documents


def builtin_corpus(name: str, vocab: int, cache: Path) -> Path:
    """The folder of the corpus `builtin:NAME`, built below `cache` if absent, with at most `vocab` tokens.

    When processes race, one folder remains and all get it. Raises PentadError for an unknown name.
    """
    out, documents = _builtin_folder(name, vocab, cache)
    if not (out / INDEX_FILE).exists():
        from pentad.workers.data.corpus_writer import write_corpus  # these import tokenizers: `pentad plan` needs none
        from pentad.workers.data.text_sources import document_chunks
        from pentad.workers.data.tokenizer import train_tokenizer

        chunks = (chunk for document in documents for chunk in document_chunks(document))
        tokenizer = train_tokenizer(documents, min(vocab, _BUILTIN_VOCAB), argument="model.vocab")
        try:
            with new_folder(out, "data.cache") as folder:
                write_corpus(folder, chunks, tokenizer, _SHARD_TOKENS, lambda line: None)
        except PentadError:
            if not (out / INDEX_FILE).exists():  # else another process built it meanwhile
                raise
    return out
