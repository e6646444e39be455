"""Reads text, JSONL and Parquet files as a stream of document chunks; at most one chunk or row is in memory."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from pentad.schedules.ir.errors import PentadError

SUFFIXES = (".txt", ".md", ".rst", ".jsonl", ".parquet")
CHUNK = 2**13  # characters; the tokenizer slows down on longer texts
_ROWS = 256
_PARQUET_BUFFER = 2**20  # bytes; without it pyarrow reads a column's whole row group at once


class TextChunk(NamedTuple):
    """At most 2 * CHUNK characters of a document; `last` ends the document. Empty documents give no chunk."""

    text: str
    last: bool


def source_files(source: Path) -> tuple[Path, ...]:
    """`source` itself, or every readable file below it in path order. Raises PentadError if there is none."""
    expected = f"expected a file that ends in {', '.join(SUFFIXES)} or a folder with such files"
    if source.is_dir():
        files = [file for file in source.rglob("*") if file.suffix.lower() in SUFFIXES and file.is_file()]
    else:
        files = [source] if source.suffix.lower() in SUFFIXES and source.is_file() else []
    if not files:
        raise PentadError(f"SOURCE is '{source}'{'' if source.exists() else ', which does not exist'}: {expected}")
    return tuple(sorted(files, key=lambda file: file.relative_to(source).parts))


def read_chunks(files: Iterable[Path], field: str) -> Iterator[TextChunk]:
    """The documents of `files`: one per text file, JSONL line (its `field`) or Parquet row (its column `field`).

    Skips null and empty texts. Raises PentadError with the file and the position of what is not text.
    """
    for file in files:
        try:
            suffix = file.suffix.lower()
            if suffix in (".jsonl", ".parquet"):
                for text in (_jsonl_texts if suffix == ".jsonl" else _parquet_texts)(file, field):
                    yield from document_chunks(text or "")
            else:
                yield from rechunk(_decoded(file))
        except OSError as error:
            raise PentadError(f"{file} cannot be read ({error.strerror or error}): expected a readable file") from None


def document_chunks(text: str) -> Iterator[TextChunk]:
    """One document that is already in memory."""
    return rechunk(text[start : start + CHUNK] for start in range(0, len(text), CHUNK))


def rechunk(parts: Iterable[str]) -> Iterator[TextChunk]:
    """Splits one document only where byte-level pre-tokenizers split as well, so its tokens do not change."""
    rest = ""
    for part in parts:
        rest += part
        while len(rest) > CHUNK:
            end = _split_point(rest)
            yield TextChunk(rest[:end], False)
            rest = rest[end:]
    if rest:
        yield TextChunk(rest, True)


def _split_point(text: str) -> int:
    """Index of the last space that follows a word (no token crosses a word's end), or CHUNK if there is none."""
    at = text.rfind(" ", 1)
    while at > 0 and text[at - 1].isspace():
        at = text.rfind(" ", 1, at)
    return at if at > 0 else CHUNK


def _decoded(file: Path) -> Iterator[str]:
    with file.open("rb") as source:
        try:
            yield from codecs.iterdecode(iter(partial(source.read, CHUNK), b""), "utf-8")
        except UnicodeDecodeError as error:
            raise _not_utf8(str(file), source.tell() - len(error.object) + error.start) from None


def _jsonl_texts(file: Path, field: str) -> Iterator[str | None]:
    offset = 0
    with file.open("rb") as source:
        for number, line in enumerate(source, 1):
            try:
                if line.strip():
                    yield _json_text(line.decode(), field, f"{file} line {number}")
            except UnicodeDecodeError as error:
                raise _not_utf8(str(file), offset + error.start) from None
            offset += len(line)


def _json_text(line: str, field: str, where: str) -> str | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise PentadError(f"{where} is not JSON ({error}): expected an object with '{field}'") from None
    if not isinstance(row, dict):
        raise PentadError(f"{where} is a JSON {type(row).__name__}: expected an object with '{field}'")
    if field not in row:
        raise PentadError(f"{where} has the fields {', '.join(map(repr, row)) or 'none'}: expected '{field}'")
    text = row[field]
    if text is not None and not isinstance(text, str):
        raise PentadError(f"{where} has '{field}' of type {type(text).__name__}: expected a string")
    try:
        (text or "").encode()
    except UnicodeEncodeError:
        raise PentadError(f"{where} has half a surrogate pair in '{field}': expected valid Unicode") from None
    return text


def _parquet_texts(file: Path, field: str) -> Iterator[str | None]:
    try:
        with pq.ParquetFile(file, buffer_size=_PARQUET_BUFFER) as table:
            schema = table.schema_arrow
            if field not in schema.names:
                raise PentadError(f"{file} has the columns {', '.join(map(repr, schema.names))}: expected '{field}'")
            kind = schema.field(field).type
            if kind not in (pa.string(), pa.large_string(), pa.string_view()):
                raise PentadError(f"{file} has column '{field}' of type {kind}: expected string")
            batches = table.iter_batches(batch_size=_ROWS, columns=[field])
            for row, value in enumerate(value for batch in batches for value in batch.column(0)):
                try:
                    yield value.as_py()
                except UnicodeDecodeError as error:
                    raise _not_utf8(f"{file} row {row}", error.start) from None
    except (pa.ArrowException, OSError) as error:
        raise PentadError(f"{file} cannot be read ({error}): expected a Parquet file") from None


def _not_utf8(where: str, offset: int) -> PentadError:
    return PentadError(f"{where} is not UTF-8 at byte {offset}: expected UTF-8 text")
