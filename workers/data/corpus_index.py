"""`index.json` of a corpus: its shards with sizes and checksums. Written last, so it marks a complete corpus."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from pentad.schedules.ir.errors import PentadError

VERSION = 1
INDEX_FILE = "index.json"
TOKENIZER_FILE = "tokenizer.json"
END = "<|endoftext|>"
MIN_VOCAB = 257  # one per byte, and the end token
MAX_VOCAB = 2**24  # the trainer allocates this many up front

_INDEX_TYPES = {"version": int, "vocab_size": int, "tokens": int, "documents": int, "tokenizer": dict, "shards": list}
_SHARD_TYPES = {"file": str, "tokens": int, "documents": int, "bytes": int, "sha256": str}
_TOKENIZER_TYPES: dict[str, type] = {"file": str, "sha256": str}


def require_vocab(vocab: int, argument: str) -> None:
    """Raises PentadError for a size that no tokenizer can be trained with."""
    if vocab < MIN_VOCAB:
        raise PentadError(f"{argument} is {vocab}: expected at least {MIN_VOCAB} (one per byte, and {END})")
    if vocab > MAX_VOCAB:
        raise PentadError(f"{argument} is {vocab}: expected at most {MAX_VOCAB}")


class Shard(NamedTuple):
    """One Arrow file of a corpus. `tokens` includes end-of-document tokens; `sha256` is of the file's bytes."""

    file: str
    tokens: int
    documents: int
    bytes: int
    sha256: str


class Index(NamedTuple):
    """Contents of `index.json`. Token ids are below `vocab_size`; `tokens` and `documents` are sums over `shards`."""

    vocab_size: int
    tokens: int
    documents: int
    tokenizer_file: str
    tokenizer_sha256: str
    shards: tuple[Shard, ...]


def plural(count: int, noun: str) -> str:
    """'1 shard', '2,000 shards'"""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def index_text(index: Index) -> str:
    """The JSON text of an index; `parse_index` is its inverse."""
    content = {
        "version": VERSION,
        "vocab_size": index.vocab_size,
        "tokens": index.tokens,
        "documents": index.documents,
        "tokenizer": {"file": index.tokenizer_file, "sha256": index.tokenizer_sha256},
        "shards": [shard._asdict() for shard in index.shards],
    }
    return json.dumps(content, indent=1) + "\n"


def parse_index(text: str, path: Path) -> Index:
    """The index in `text`, read from `path`. Raises PentadError if it is not pentad's or its sums are wrong."""
    try:
        content: dict[str, Any] = json.loads(text)
    except ValueError as error:
        raise PentadError(f"{path} is not JSON ({error}): expected the index of a pentad corpus") from None
    _check_types(content, _INDEX_TYPES, path, "")
    _check_types(content["tokenizer"], _TOKENIZER_TYPES, path, "tokenizer.")
    for number, shard in enumerate(content["shards"]):
        _check_types(shard, _SHARD_TYPES, path, f"shards[{number}].")
    if content["version"] != VERSION:
        raise PentadError(f"{path} has version {content['version']}: expected {VERSION} (build the corpus again)")
    shards = tuple(Shard(**{key: shard[key] for key in _SHARD_TYPES}) for shard in content["shards"])
    for key in ("tokens", "documents"):
        total = sum(getattr(shard, key) for shard in shards)
        if total != content[key]:
            raise PentadError(f"{path} has {key} = {content[key]}: expected {total}, the sum over its shards")
    tokenizer = content["tokenizer"]
    counts = (content["vocab_size"], content["tokens"], content["documents"])
    return Index(*counts, tokenizer["file"], tokenizer["sha256"], shards)


def _check_types(content: object, types: dict[str, type], path: Path, prefix: str) -> None:
    """Every key of `types` is present with its type, counts are not negative, files are names inside the folder."""
    if not isinstance(content, dict):
        kind = type(content).__name__
        raise PentadError(f"{path} holds a {kind} at '{prefix}': expected the index of a pentad corpus")
    for key, expected in types.items():
        value = content.get(key)
        if type(value) is not expected:
            found = f"no {prefix}{key}" if value is None else f"{prefix}{key} = {value!r}"
            raise PentadError(f"{path} has {found}: expected the {expected.__name__} of a pentad corpus")
        if isinstance(value, int) and value < 0:
            raise PentadError(f"{path} has {prefix}{key} = {value}: expected a count of at least 0")
        if key == "file" and value != Path(str(value)).name:
            raise PentadError(f"{path} has {prefix}{key} = {value!r}: expected the name of a file in its folder")
