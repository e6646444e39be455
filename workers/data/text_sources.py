"""Text files, JSONL and Parquet as one stream of document pieces, never more than a piece or a row in memory."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from pentad.schedules.ir.errors import PentadError

ENDINGS = (".txt", ".md", ".rst", ".jsonl", ".parquet")
PIECE = 2**13  # characters; the tokenizer slows down on longer texts
_ROWS = 256
_PARQUET_BUFFER = 2**20  # bytes; without it a column's whole row group is read at once


class Piece(NamedTuple):
    """At most 2 * PIECE characters of a document; `last` ends it. No document without characters is in a stream."""

    text: str
    last: bool


def source_files(source: Path) -> tuple[Path, ...]:
    """`source` itself, or every readable file below it ordered by its path. Raises PentadError if there is none."""
    if not source.exists():
        raise PentadError(
            f"SOURCE is '{source}', which does not exist; expected a folder or a {', '.join(ENDINGS)} file"
        )
    if not source.is_dir():
        if not source.is_file() or source.suffix.lower() not in ENDINGS:
            raise PentadError(f"SOURCE is '{source}': expected a folder or a file that ends in {', '.join(ENDINGS)}")
        return (source,)
    files = [file for file in source.rglob("*") if file.suffix.lower() in ENDINGS and file.is_file()]
    if not files:
        raise PentadError(f"SOURCE is '{source}', a folder without a file that ends in {', '.join(ENDINGS)}")
    return tuple(sorted(files, key=lambda file: file.relative_to(source).parts))


def read_pieces(files: Iterable[Path], field: str) -> Iterator[Piece]:
    """The documents of `files`: a text file is one, a JSONL line one (`field`), a Parquet row one (column `field`).

    Null and empty texts are left out. Raises PentadError with file and place for what is no text.
    """
    for file in files:
        try:
            yield from _file_pieces(file, field)
        except OSError as error:
            raise PentadError(f"{file} cannot be read ({error.strerror or error}): expected a readable file") from None


def _file_pieces(file: Path, field: str) -> Iterator[Piece]:
    match file.suffix.lower():
        case ".jsonl":
            texts = _jsonl(file, field)
        case ".parquet":
            texts = _parquet(file, field)
        case _:
            yield from pieces(_decoded(file))
            return
    for text in texts:
        yield from text_pieces(text)


def text_pieces(text: str) -> Iterator[Piece]:
    """One document that is in memory."""
    return pieces(text[start : start + PIECE] for start in range(0, len(text), PIECE))


def pieces(chunks: Iterable[str]) -> Iterator[Piece]:
    """One document cut where byte-level pre-tokenizers cut too, so that encoding pieces gives the document's tokens."""
    rest = ""
    for chunk in chunks:
        rest += chunk
        while len(rest) > PIECE:
            cut = _cut(rest)
            yield Piece(rest[:cut], False)
            rest = rest[cut:]
    if rest:
        yield Piece(rest, True)


def _cut(text: str) -> int:
    """Where the last space after a word is; PIECE if there is none. No token goes on beyond a word's end."""
    at = text.rfind(" ", 1)
    while at > 0 and text[at - 1].isspace():
        at = text.rfind(" ", 1, at)
    return at if at > 0 else PIECE


def _decoded(file: Path) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    place = 0
    with file.open("rb") as source:
        while True:
            chunk = source.read(PIECE)
            pending = len(decoder.getstate()[0])
            try:
                text = decoder.decode(chunk, final=not chunk)
            except UnicodeDecodeError as error:
                raise _no_utf8(file, place - pending + error.start) from None
            if text:
                yield text
            if not chunk:
                return
            place += len(chunk)


def _jsonl(file: Path, field: str) -> Iterator[str]:
    place = 0
    with file.open("rb") as source:
        for number, line in enumerate(source, 1):
            if line.strip():
                text = _json_text(file, field, number, line, place)
                if text is not None:
                    yield text
            place += len(line)


def _json_text(file: Path, field: str, number: int, line: bytes, place: int) -> str | None:
    where = f"{file} line {number}"
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise _no_utf8(file, place + error.start) from None
    except (ValueError, RecursionError) as error:
        raise PentadError(f"{where} is no JSON ({error}): expected an object with '{field}'") from None
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
        raise PentadError(f"{where} has half of a surrogate pair in '{field}': expected text") from None
    return text


def _parquet(file: Path, field: str) -> Iterator[str]:
    row = 0
    try:
        with pq.ParquetFile(file, buffer_size=_PARQUET_BUFFER) as table:
            schema = table.schema_arrow
            if field not in schema.names:
                raise PentadError(f"{file} has the columns {', '.join(map(repr, schema.names))}: expected '{field}'")
            kind = schema.field(field).type
            if kind not in (pa.string(), pa.large_string(), pa.string_view()):
                raise PentadError(f"{file} has column '{field}' of type {kind}: expected string")
            for batch in table.iter_batches(batch_size=_ROWS, columns=[field]):
                for value in batch.column(0):
                    text = value.as_py()
                    if text is not None:
                        yield text
                    row += 1
    except UnicodeDecodeError as error:
        raise PentadError(f"{file} row {row} is no UTF-8 at byte {error.start}: expected UTF-8 text") from None
    except (pa.ArrowException, OSError) as error:
        raise PentadError(f"{file} is unreadable ({error}): expected a Parquet file") from None


def _no_utf8(file: Path, place: int) -> PentadError:
    return PentadError(f"{file} is no UTF-8 at byte {place}: expected UTF-8 text")
