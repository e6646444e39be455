"""Reads text, JSONL, CSV, Parquet and Arrow files: as text, or as rows of some of their columns."""

from __future__ import annotations

import codecs
import csv
import io
import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from pentad.schedules.ir.errors import PentadError
from pentad.workers.preprocess.source_files import SourceFile, readable

_BLOCK = 2**20  # bytes
_ROWS = 256
_LONGEST_VALUE = 2**31 - 1  # characters of a CSV value, which may be a long document
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


@dataclass(frozen=True)
class FileSpan:
    """A part of a file: of JSONL the lines that start in a range of bytes, of Parquet a range of row groups, of other
    formats the whole file. `stop` None: to the end."""

    file: SourceFile
    start: int = 0
    stop: int | None = None


@dataclass(frozen=True)
class Columns:
    """The columns to read from a row: those of the first of the `alternatives` that it has completely, and those
    `optional` ones that it has.

    `hint` tells the user what to do if it has none of the alternatives.
    """

    alternatives: tuple[tuple[str, ...], ...]
    optional: tuple[str, ...] = ()
    hint: str = ""

    def of(self, names: Iterable[str], where: Callable[[], str], kind: str) -> list[str]:
        """The columns to read out of `names`. Raises PentadError, which lists the names; `kind` is 'columns' or
        'fields'."""
        names = list(names)
        for needed in self.alternatives:
            if all(name in names for name in needed):
                return [*needed, *(name for name in self.optional if name in names)]
        expected = " or ".join(" and ".join(map(repr, needed)) for needed in self.alternatives)
        raise PentadError(
            f"{where()} has the {kind} {', '.join(map(repr, names)) or 'none'}: expected {expected}{self.hint}"
        )


class SourceRow(NamedTuple):
    """Values by column; `where` returns the position for an error."""

    values: dict[str, Any]
    where: Callable[[], str]


def read_text(file: SourceFile) -> Iterator[str]:
    """A text file in blocks. Raises PentadError for a file that cannot be read or is not UTF-8."""
    with readable(file.uri), file.open() as source:
        offset = 0
        blocks = iter(partial(source.read, _BLOCK), b"")
        decoder = codecs.getincrementaldecoder("utf-8")()
        for block in blocks:
            pending = len(decoder.getstate()[0])
            try:
                yield decoder.decode(block)
            except UnicodeDecodeError as error:
                raise _not_utf8(file.uri, offset - pending + error.start) from None
            offset += len(block)
        pending = len(decoder.getstate()[0])
        if pending:
            raise _not_utf8(file.uri, offset - pending)


def read_rows(span: FileSpan, columns: Columns) -> Iterator[SourceRow]:
    """The rows of a span of a JSONL, CSV, Parquet or Arrow file. Raises PentadError for any fault of the file."""
    read = {".jsonl": _jsonl, ".csv": _csv, ".parquet": _parquet, ".arrow": _arrow}[span.file.format]
    with readable(span.file.uri):
        yield from read(span, columns)


def _jsonl(span: FileSpan, columns: Columns) -> Iterator[SourceRow]:
    with span.file.open() as raw, io.BufferedReader(raw, _BLOCK) as source:
        offset = span.start
        if offset:  # skip a line that started before the span; reading begins one byte earlier to detect a line's end
            source.seek(offset - 1)
            offset += len(source.readline()) - 1
        while (span.stop is None or offset < span.stop) and (line := source.readline()):
            where = partial(_line_name, span.file, offset)
            if not line.isspace():
                yield SourceRow(_json_row(line, columns, where, offset, span.file), where)
            offset += len(line)


def _json_row(line: bytes, columns: Columns, where: Callable[[], str], offset: int, file: SourceFile) -> dict[str, Any]:
    try:
        row = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise _not_utf8(file.uri, offset + error.start) from None
    except (ValueError, RecursionError) as error:
        raise PentadError(f"{where()} is not JSON ({error}): expected an object") from None
    if not isinstance(row, dict):
        raise PentadError(f"{where()} is a JSON {type(row).__name__}: expected an object")
    values = {name: row[name] for name in columns.of(row, where, "fields")}
    if b"\\u" in line and _SURROGATE.search(line):
        try:
            json.dumps(values, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise PentadError(f"{where()} has half a surrogate pair: expected valid Unicode") from None
    return values


def _line_name(file: SourceFile, offset: int) -> str:
    """'FILE line N' for a byte offset; called only for errors, as it counts the lines."""
    lines, left = 1, offset
    with readable(file.uri), file.open() as source:
        while left and (block := source.read(min(left, _BLOCK))):
            lines, left = lines + block.count(b"\n"), left - len(block)
    return f"{file.uri} line {lines}"


def _csv(span: FileSpan, columns: Columns) -> Iterator[SourceRow]:
    rows, name, limit = csv.reader(_lines(read_text(span.file)), strict=True), span.file.uri, csv.field_size_limit()
    csv.field_size_limit(_LONGEST_VALUE)
    try:
        header = [column.removeprefix("\ufeff") for column in next(rows, [])]
        chosen = {column: header.index(column) for column in columns.of(header, lambda: name, "columns")}
        for row in rows:
            where = f"{name} line {rows.line_num}".format
            if row and len(row) != len(header):
                raise PentadError(f"{where()} has {len(row)} values: expected {len(header)}, as in the first line")
            if row:
                yield SourceRow({column: row[number] for column, number in chosen.items()}, where)
    except csv.Error as error:
        raise PentadError(
            f"{name} line {rows.line_num} is not CSV ({error}): expected comma-separated values"
        ) from None
    finally:
        csv.field_size_limit(limit)


def _lines(blocks: Iterable[str]) -> Iterator[str]:
    rest = ""
    for block in blocks:
        *lines, rest = (rest + block).split("\n")
        yield from (line + "\n" for line in lines)
    if rest:
        yield rest


def _parquet(span: FileSpan, columns: Columns) -> Iterator[SourceRow]:
    name = span.file.uri
    if span.file.codec:
        raise PentadError(f"{name} is compressed as a whole: expected a Parquet file, which compresses its columns")
    try:
        with span.file.open() as source, pq.ParquetFile(source, buffer_size=_BLOCK, pre_buffer=False) as table:
            groups = range(span.start, table.num_row_groups if span.stop is None else span.stop)
            first = sum(table.metadata.row_group(group).num_rows for group in range(span.start))
            chosen = columns.of(table.schema_arrow.names, lambda: name, "columns")
            batches = table.iter_batches(_ROWS, row_groups=list(groups), columns=chosen)
            yield from _table_rows(batches, name, first)
    except (pa.ArrowException, UnicodeDecodeError) as error:  # UnicodeDecodeError for column names
        raise PentadError(f"{name} cannot be read ({error}): expected a Parquet file") from None


def parquet_groups(file: SourceFile) -> int:
    """The number of row groups. Raises PentadError."""
    try:
        with readable(file.uri), file.open() as source:
            return int(pq.read_metadata(source).num_row_groups)
    except pa.ArrowException as error:
        raise PentadError(f"{file.uri} cannot be read ({error}): expected a Parquet file") from None


def _arrow(span: FileSpan, columns: Columns) -> Iterator[SourceRow]:
    name = span.file.uri
    try:
        with span.file.open() as source:
            batches = iter(_ipc_batches(source, span.file.codec is None))
            schema = next(batches)
            chosen = columns.of(schema.names, lambda: name, "columns")
            intact = (_validated(batch.select(chosen)) for batch in batches)
            small = (batch.slice(at, _ROWS) for batch in intact for at in range(0, len(batch), _ROWS))
            yield from _table_rows(small, name, 0)
    except (pa.ArrowException, OSError, MemoryError, OverflowError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise PentadError(f"{name} cannot be read ({reason}): expected an Arrow IPC file or stream") from None


def _validated(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The batch, after checking its offsets, so that nothing is read out of bounds. Text that is not UTF-8 is reported
    when it is decoded."""
    for column in batch.columns:
        try:
            column.validate(full=True)
        except pa.ArrowInvalid as error:  # an error about UTF-8 means that the offsets of a string column are intact
            if column.type not in (pa.string(), pa.large_string()) or "UTF8" not in str(error):
                raise
    return batch


def _ipc_batches(source: pa.NativeFile, seekable: bool) -> Iterator[Any]:
    """The schema, then the record batches, of Arrow's file format or its stream format, which `datasets` writes."""
    if seekable:
        magic = source.read(6)
        source.seek(0)
        if magic == b"ARROW1":
            reader = pa.ipc.open_file(source)
            yield reader.schema
            yield from (reader.get_batch(number) for number in range(reader.num_record_batches))
            return
    stream = pa.ipc.open_stream(source)
    yield stream.schema
    yield from stream


def _table_rows(batches: Iterable[pa.RecordBatch], name: str, first: int) -> Iterator[SourceRow]:
    for batch in batches:
        try:
            rows = batch.to_pylist()
        except UnicodeDecodeError:
            rows = [
                _decoded_row(batch.slice(number, 1), f"{name} row {first + number}") for number in range(len(batch))
            ]
        for number, values in enumerate(rows, first):
            yield SourceRow(values, f"{name} row {number}".format)
        first += len(batch)


def _decoded_row(row: pa.RecordBatch, where: str) -> dict[str, Any]:
    try:
        values: dict[str, Any] = row.to_pylist()[0]
        return values
    except UnicodeDecodeError as error:
        raise _not_utf8(where, error.start) from None


def _not_utf8(where: str, offset: int) -> PentadError:
    return PentadError(f"{where} is not UTF-8 at byte {offset}: expected UTF-8 text")
