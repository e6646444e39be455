"""Rows to Arrow files and back; a file that is read may be damaged, or written by anyone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pyarrow as pa

from pentad.schedules.ir.arrow_arrays import filled_array
from pentad.schedules.ir.errors import PentadError


def table_of(rows: Iterable[tuple], schema: pa.Schema) -> pa.Table:
    """A table of strings and numbers without nulls."""
    columns = list(zip(*rows, strict=True)) or [()] * len(schema)
    return pa.table([filled_array(c, f.type) for c, f in zip(columns, schema, strict=True)], schema=schema)


def rows_of(table: pa.Table) -> Iterator[tuple]:
    return zip(*(column.to_pylist() for column in table.columns), strict=True)


def file_bytes(table: pa.Table) -> bytes:
    """An Arrow file."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


def read_table(data: bytes) -> pa.Table:
    """The rows of an Arrow file, after its offsets and strings have been checked. Raises PentadError if the bytes are
    not an intact file."""
    try:
        table = pa.ipc.open_file(pa.BufferReader(data)).read_all()
        table.validate(full=True)
    except (OSError, ValueError, MemoryError, pa.ArrowException) as error:
        reason = " ".join(str(error).split())[:200]
        raise PentadError(f"{len(data)} bytes are not an intact Arrow file: {reason}") from None
    return table


def require_no_nulls(table: pa.Table) -> None:
    """Raises PentadError for a column with nulls."""
    for name, column in zip(table.column_names, table.columns, strict=True):
        if column.null_count:
            raise PentadError(f"column {name} of the Arrow table has {column.null_count} nulls: expected none")


def require_range(table: pa.Table, name: str, low: float, high: float) -> None:
    """Raises PentadError for a column with a number that is NaN or not from `low` to `high`."""
    values = table.column(name).to_numpy()
    wrong = values[~((values >= low) & (values <= high))]
    if len(wrong):
        expected = f"at least {low:g}" if high == float("inf") else f"{low:g} to {high:g}"
        raise PentadError(f"column {name} of the Arrow table has {wrong[0]}: expected {expected}")
