"""`index.json`, the last file of a corpus to be written: what the shards hold and their checksums."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from pentad.schedules.ir.errors import PentadError

VERSION = 1
INDEX_FILE = "index.json"
TOKENIZER_FILE = "tokenizer.json"

_INDEX_TYPES = {"version": int, "vocab_size": int, "tokens": int, "documents": int, "tokenizer": dict, "shards": list}
_SHARD_TYPES = {"file": str, "tokens": int, "documents": int, "bytes": int, "sha256": str}
_TOKENIZER_TYPES: dict[str, type] = {"file": str, "sha256": str}


class Shard(NamedTuple):
    """One Arrow file of a corpus. `tokens` counts the end-of-document tokens too; `sha256` is of the file's bytes."""

    file: str
    tokens: int
    documents: int
    bytes: int
    sha256: str


class Index(NamedTuple):
    """All of `index.json`. Token ids are below `vocab_size`; `tokens` and `documents` are the sums over `shards`."""

    vocab_size: int
    tokens: int
    documents: int
    tokenizer_file: str
    tokenizer_sha256: str
    shards: tuple[Shard, ...]


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
    """The index in `text`, read from `path`. Raises PentadError if pentad did not write it or its sums disagree."""
    content = _content(text, path)
    if content["version"] != VERSION:
        raise PentadError(f"{path} has version {content['version']}: expected {VERSION}: build the corpus again")
    shards = tuple(Shard(**{key: shard[key] for key in _SHARD_TYPES}) for shard in content["shards"])
    tokenizer = content["tokenizer"]
    index = Index(
        content["vocab_size"],
        content["tokens"],
        content["documents"],
        tokenizer["file"],
        tokenizer["sha256"],
        shards,
    )
    for key in ("tokens", "documents"):
        total = sum(getattr(shard, key) for shard in shards)
        if total != content[key]:
            raise PentadError(f"{path} counts {content[key]} {key}: expected the {total} of its shards")
    return index


def _content(text: str, path: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(text)
    except ValueError as error:
        raise PentadError(f"{path} is no JSON ({error}): expected the index of a pentad corpus") from None
    _demand(content, _INDEX_TYPES, path, "")
    _demand(content["tokenizer"], _TOKENIZER_TYPES, path, "tokenizer.")
    for number, shard in enumerate(content["shards"]):
        _demand(shard, _SHARD_TYPES, path, f"shards[{number}].")
    return content


def _demand(content: object, types: dict[str, type], path: Path, prefix: str) -> None:
    """Every key of `types` is there with its type, counts are not negative, files are names inside the folder."""
    if not isinstance(content, dict):
        raise PentadError(
            f"{path} holds a {type(content).__name__} at '{prefix}': expected the index of a pentad corpus"
        )
    for key, expected in types.items():
        value = content.get(key)
        if type(value) is not expected:
            found = f"no {prefix}{key}" if value is None else f"{prefix}{key} = {value!r}"
            raise PentadError(f"{path} has {found}: expected the {expected.__name__} that a pentad corpus has there")
        if isinstance(value, int) and value < 0:
            raise PentadError(f"{path} has {prefix}{key} = {value}: expected a count of at least 0")
        if key == "file" and value != Path(str(value)).name:
            raise PentadError(f"{path} has {prefix}{key} = {value!r}: expected the name of a file beside the index")
