"""Tables for terminals. On a narrow one columns are dropped, so that no value is cut off."""

from __future__ import annotations

from collections.abc import Sequence

from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

Cell = str | Text


def table_of(*heads: str) -> Table:
    """An empty table without lines; a head that ends in '>' is that of a right-aligned column."""
    table = Table(box=None, padding=(0, 1), header_style="dim", pad_edge=True)
    for head in heads:
        table.add_column(head.rstrip(">"), justify="right" if head.endswith(">") else "left", no_wrap=True)
    return table


def fitted_table(
    heads: Sequence[str], rows: Sequence[Sequence[Cell]], width: int, *, drop: Sequence[str], wrapped: str = ""
) -> Table:
    """A table of at most `width` characters: columns are dropped in the order of `drop` until the others fit.

    The column `wrapped` may take several lines per row.
    """
    names, left = [head.rstrip(">") for head in heads], list(range(len(heads)))

    def needed(column: int) -> int:
        texts = [names[column], *(str(row[column]) for row in rows)]
        parts = [word for text in texts for word in text.split()] if names[column] == wrapped else texts
        return 2 + max(map(cell_len, parts))

    for name in drop:
        if sum(map(needed, left)) <= width:
            break
        left.remove(names.index(name))
    table = table_of(*(heads[column] for column in left))
    for column, index in zip(table.columns, left, strict=True):
        column.no_wrap = names[index] != wrapped
    for row in rows:
        table.add_row(*(row[column] for column in left))
    return table
