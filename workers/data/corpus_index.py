"""`index.json` of a corpus: where everything is in its shards, so that a corpus opens without reading them.

It is written last, so it marks a complete corpus.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, is_dataclass
from functools import lru_cache
from pathlib import Path
from reprlib import repr as shown  # of bounded work and length
from typing import Any, NamedTuple, get_args, get_type_hints

import numpy as np

from pentad.schedules.ir.errors import PentadError

VERSION = 3
INDEX_FILE = "index.json"
TOKENIZER_FILE = "tokenizer.json"
END = "<|endoftext|>"
MIN_VOCAB = 257  # one per byte, and the end token
MAX_VOCAB = 2**24  # the tokenizer's trainer allocates the vocabulary up front
MAX_SHARD_BYTES = 2**40
CHECKED = 2**16  # bytes of a shard per checksum


def require_vocab(vocab: int, argument: str) -> None:
    """Raises PentadError for a vocabulary size with which no tokenizer can be trained."""
    if vocab < MIN_VOCAB:
        raise PentadError(f"{argument} is {vocab}: expected at least {MIN_VOCAB} (one per byte, and {END})")
    if vocab > MAX_VOCAB:
        raise PentadError(f"{argument} is {vocab}: expected at most {MAX_VOCAB}")


class RecordBatch(NamedTuple):
    """Complete documents in a shard. The last three fields are where the columns start in the file, in bytes; the
    offsets are [documents + 1] int64, ascending from 0, and `loss_mask_at` is 0 for a shard without loss masks."""

    tokens: int
    documents: int
    tokens_at: int
    offsets_at: int
    loss_mask_at: int


@dataclass(frozen=True)
class Shard:
    """One Arrow file of a corpus. `tokens` includes end-of-document tokens.

    `checksums` is the sha256 of the checksum file beside it, which has the CRC-32 of every block of CHECKED bytes.
    """

    file: str
    tokens: int
    documents: int
    bytes: int
    checksums: str
    batches: tuple[RecordBatch, ...]

    @property
    def has_loss_mask(self) -> bool:
        return any(batch.loss_mask_at for batch in self.batches)


@dataclass(frozen=True)
class TokenizerFile:
    file: str
    sha256: str


@dataclass(frozen=True)
class Origin:
    """How a corpus was made: from which fields of the rows, and with which chat template (its sha256, "" for plain
    text).

    The counts are of what was left out: rows whose text is null or empty, and conversations without a trained token.
    """

    fields: str
    chat_template: str
    empty_rows: int
    untrained_conversations: int


PLAIN = Origin("", "", 0, 0)  # for text that does not come in rows


@dataclass(frozen=True, kw_only=True)
class Index:
    """Contents of `index.json`. Token ids are below `vocab_size` and stored as `dtype`, uint16 or uint32; `tokens` and
    `documents` are sums over `shards`."""

    version: int = VERSION
    vocab_size: int
    dtype: str
    tokens: int
    documents: int
    tokenizer: TokenizerFile
    origin: Origin
    shards: tuple[Shard, ...]


def plural(count: int, noun: str) -> str:
    """A count with its noun: '1 shard', '2,000 shards'."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def checksum_file(shard: str) -> str:
    """The name of a shard's checksum file, which holds little-endian uint32."""
    return shard.removesuffix(".arrow") + ".crc32"


def index_text(index: Index) -> str:
    """The JSON text of an index, with one line per shard; `parse_index` is the inverse."""
    fields = {field: value for field, value in vars(index).items() if field != "shards"}
    records = {"tokenizer": asdict(index.tokenizer), "origin": asdict(index.origin)}
    text = json.dumps(fields | records, indent=1).removesuffix("\n}")
    shards = ",\n  ".join(json.dumps(vars(shard)) for shard in index.shards)
    return f'{text},\n "shards": [\n  {shards}\n ]\n}}\n'


def parse_index(text: str, path: Path | str) -> Index:
    """The index in `text`, read from `path`. Raises PentadError if it is not a pentad index or is inconsistent."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise PentadError(f"{path} is not JSON ({error}): expected the index of a pentad corpus") from None
    version = content.get("version") if isinstance(content, dict) else None
    if isinstance(version, int) and version != VERSION:
        raise PentadError(f"{path} has version {version}: expected {VERSION} (build the corpus again)")
    index: Index = _parse(Index, content, path)
    if index.dtype not in ("uint16", "uint32"):
        raise PentadError(f"{path} has dtype = {index.dtype!r}: expected uint16 or uint32")
    for key in ("tokens", "documents"):
        _require_sum(getattr(index, key), (getattr(shard, key) for shard in index.shards), key, "shards", path)
        for number, shard in enumerate(index.shards):
            name, parts = f"shards[{number}].{key}", (getattr(batch, key) for batch in shard.batches)
            _require_sum(getattr(shard, key), parts, name, "record batches", path)
    for number, shard in enumerate(index.shards):
        if shard.bytes > MAX_SHARD_BYTES:
            expected = f"expected at most {MAX_SHARD_BYTES}"
            raise PentadError(f"{path} has shards[{number}].bytes = {shard.bytes}: {expected}")
        _require_inside(shard, np.dtype(index.dtype).itemsize, f"shards[{number}].batches", path)
    return index


def _require_sum(found: int, parts: Iterable[int], name: str, of: str, path: Path | str) -> None:
    if found != (total := sum(parts)):
        raise PentadError(f"{path} has {name} = {found}: expected {total}, the sum over its {of}")


def _require_inside(shard: Shard, itemsize: int, name: str, path: Path | str) -> None:
    """Raises PentadError for a record batch that reaches beyond its file."""
    has_loss_mask = shard.has_loss_mask
    for tokens, documents, tokens_at, offsets_at, loss_mask_at in shard.batches:
        ends = tokens_at + itemsize * tokens, offsets_at + 8 * (documents + 1), loss_mask_at + tokens
        if max(ends) > shard.bytes or bool(loss_mask_at) != has_loss_mask:
            raise PentadError(f"{path} has {name} beyond byte {shard.bytes}: expected record batches inside the file")


_types_of = lru_cache(get_type_hints)  # cached, as it compiles every annotation and is needed for each shard


def _parse(kind: Any, content: Any, path: Path | str, prefix: str = "") -> Any:
    """A dataclass from JSON. Raises PentadError unless fields have their types, counts are not negative, and files are
    names inside the folder."""
    if not isinstance(content, dict):
        found = type(content).__name__
        raise PentadError(f"{path} holds a {found} at '{prefix}': expected the index of a pentad corpus")
    values = {}
    for key, expected in _types_of(kind).items():
        name = f"{prefix}{key}"
        value: Any = content.get(key)
        of_each = next(iter(get_args(expected)), None)  # the element type of a tuple
        stored: Any = list if of_each else dict if is_dataclass(expected) else expected
        if type(value) is not stored:
            found = f"no {name}" if value is None else f"{name} = {shown(value)}"
            raise PentadError(f"{path} has {found}: expected the {stored.__name__} of a pentad corpus")
        if stored is int and value < 0:
            raise PentadError(f"{path} has {name} = {value}: expected a count of at least 0")
        if key == "file" and (value != Path(value).name or not value.isprintable()):
            raise PentadError(f"{path} has {name} = {shown(value)}: expected the name of a file in its folder")
        if of_each is RecordBatch:
            value = _record_batches(value, name, path)
        elif stored is list:
            value = tuple(_parse(of_each, each, path, f"{name}[{number}].") for number, each in enumerate(value))
        values[key] = _parse(expected, value, path, f"{name}.") if stored is dict else value
    return kind(**values)


def _record_batches(rows: list[Any], name: str, path: Path | str) -> tuple[RecordBatch, ...]:
    try:
        batches = tuple(RecordBatch(*row) for row in rows)
    except TypeError:
        batches = ()
    if len(batches) != len(rows) or not all(type(x) is int and x >= 0 for batch in batches for x in batch):
        raise PentadError(f"{path} has {name} of another form: expected {len(RecordBatch._fields)} counts each")
    return batches
