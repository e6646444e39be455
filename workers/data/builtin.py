"""Corpora that need no download: text that every Python brings along, built into a cache at first use."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Callable
from pathlib import Path
from pydoc_data.topics import topics

from pentad.schedules.ir.errors import PentadError
from pentad.workers.data.corpus_index import INDEX_FILE, VERSION
from pentad.workers.data.corpus_writer import write_corpus
from pentad.workers.data.text_sources import text_pieces
from pentad.workers.data.tokenizer import train_tokenizer

_SHARD_TOKENS = 2**26


def builtin_corpus(name: str, vocab: int, cache: Path) -> Path:
    """Folder of the corpus `builtin:NAME` with a tokenizer of at most `vocab` tokens, built below `cache` if needed.

    Processes may race: one's folder stays and all get it. Raises PentadError for an unknown name.
    """
    if name not in _TEXTS:
        known = ", ".join(f"builtin:{known}" for known in _TEXTS)
        raise PentadError(f"data.path is builtin:{name}: expected one of {known}")
    documents = _TEXTS[name]()
    digest = hashlib.sha256("\0".join([str(VERSION), *documents]).encode()).hexdigest()
    out = cache / f"{name}-{vocab}-python{platform.python_version()}-{digest[:16]}"
    if not (out / INDEX_FILE).exists():
        pieces = (piece for document in documents for piece in text_pieces(document))
        tokenizer = train_tokenizer(documents, vocab, argument="model.vocab")
        try:
            write_corpus(out, pieces, tokenizer, _SHARD_TOKENS, lambda line: None)
        except OSError as error:
            if not (out / INDEX_FILE).exists():  # else another process built the same
                reason = error.strerror or str(error)
                text = f"data.cache is '{cache}', where {out.name} cannot be written ({reason})"
                raise PentadError(f"{text}: expected a folder with room") from None
    return out


def _pydoc() -> list[str]:
    """Python's language reference as `help()` shows it: 80 topics, 0.5 MB of English."""
    return [topics[name] for name in sorted(topics)]


_TEXTS: dict[str, Callable[[], list[str]]] = {"pydoc": _pydoc}
