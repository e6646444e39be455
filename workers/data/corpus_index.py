"""`index.json` of a corpus: its shards with sizes and checksums. Written last, so it marks a complete corpus."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

from pentad.schedules.ir.errors import PentadError

VERSION = 1
INDEX_FILE = "index.json"
TOKENIZER_FILE = "tokenizer.json"
END = "<|endoftext|>"
MIN_VOCAB = 257  # one per byte, and the end token
MAX_VOCAB = 2**24  # the trainer allocates this many up front


def require_vocab(vocab: int, argument: str) -> None:
    """Raises PentadError for a size that no tokenizer can be trained with."""
    if vocab < MIN_VOCAB:
        raise PentadError(f"{argument} is {vocab}: expected at least {MIN_VOCAB} (one per byte, and {END})")
    if vocab > MAX_VOCAB:
        raise PentadError(f"{argument} is {vocab}: expected at most {MAX_VOCAB}")


@dataclass(frozen=True)
class Shard:
    """One Arrow file of a corpus. `tokens` includes end-of-document tokens; `sha256` is of the file's bytes."""

    file: str
    tokens: int
    documents: int
    bytes: int
    sha256: str


@dataclass(frozen=True)
class TokenizerFile:
    file: str
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Index:
    """Contents of `index.json`. Token ids are below `vocab_size`; `tokens` and `documents` are sums over `shards`."""

    version: int = VERSION
    vocab_size: int
    tokens: int
    documents: int
    tokenizer: TokenizerFile
    shards: tuple[Shard, ...]


def plural(count: int, noun: str) -> str:
    """'1 shard', '2,000 shards'"""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def index_text(index: Index) -> str:
    """The JSON text of an index; `parse_index` is its inverse."""
    return json.dumps(asdict(index), indent=1) + "\n"


def parse_index(text: str, path: Path) -> Index:
    """The index in `text`, read from `path`. Raises PentadError if it is not pentad's or its sums are wrong."""
    try:
        content = json.loads(text)
    except ValueError as error:
        raise PentadError(f"{path} is not JSON ({error}): expected the index of a pentad corpus") from None
    index: Index = _parse(Index, content, path)
    if index.version != VERSION:
        raise PentadError(f"{path} has version {index.version}: expected {VERSION} (build the corpus again)")
    for key in ("tokens", "documents"):
        found, total = getattr(index, key), sum(getattr(shard, key) for shard in index.shards)
        if found != total:
            raise PentadError(f"{path} has {key} = {found}: expected {total}, the sum over its shards")
    return index


def _parse(kind: Any, content: Any, path: Path, prefix: str = "") -> Any:
    """A dataclass from JSON: fields have their types, counts are not negative, files are names inside the folder."""
    if not isinstance(content, dict):
        found = type(content).__name__
        raise PentadError(f"{path} holds a {found} at '{prefix}': expected the index of a pentad corpus")
    values = {}
    for key, expected in get_type_hints(kind).items():
        name = f"{prefix}{key}"
        value: Any = content.get(key)
        of_each = next(iter(get_args(expected)), None)  # of a tuple
        stored: Any = list if of_each else dict if is_dataclass(expected) else expected
        if type(value) is not stored:
            found = f"no {name}" if value is None else f"{name} = {value!r}"
            raise PentadError(f"{path} has {found}: expected the {stored.__name__} of a pentad corpus")
        if stored is int and value < 0:
            raise PentadError(f"{path} has {name} = {value}: expected a count of at least 0")
        if key == "file" and value != Path(value).name:
            raise PentadError(f"{path} has {name} = {value!r}: expected the name of a file in its folder")
        if stored is list:
            value = tuple(_parse(of_each, each, path, f"{name}[{number}].") for number, each in enumerate(value))
        values[key] = _parse(expected, value, path, f"{name}.") if stored is dict else value
    return kind(**values)
