"""Tables and lines for terminals. On narrow ones, columns of a table are dropped so that no value is cut off."""

from __future__ import annotations

from collections.abc import Sequence

from rich.cells import cell_len
from rich.console import JustifyMethod
from rich.table import Table
from rich.text import Text

from pentad.schedules.ir.errors import printable

MOST_RANKS = 32  # most rows of a table of ranks


def fitted_table(
    heads: Sequence[str],
    rows: Sequence[Sequence[str | Text]],
    width: int,
    *,
    drop: Sequence[str],
    wrapped: Sequence[str] = (),
) -> Table:
    """A table of at most `width` characters: columns are dropped in the order of `drop` until the others fit.

    A head that ends in '>' marks a right-aligned column. The columns in `wrapped` may take several lines per row, but
    break no words.
    """
    columns = {head.rstrip(">"): (head, [_safe(row[index]) for row in rows]) for index, head in enumerate(heads)}

    def needed(name: str) -> int:
        texts = [name, *map(str, columns[name][1])]
        parts = [word for text in texts for word in text.split()] if name in wrapped else texts
        return max(map(cell_len, parts))

    for name in drop:
        if sum(2 + needed(each) for each in columns) <= width:
            break
        del columns[name]
    table = Table(box=None, padding=(0, 1), header_style="dim", pad_edge=True)
    for name, (head, _) in columns.items():
        justify: JustifyMethod = "right" if head.endswith(">") else "left"
        table.add_column(name, justify=justify, no_wrap=name not in wrapped, min_width=needed(name))
    for cells in zip(*(cells for _, cells in columns.values()), strict=True):
        table.add_row(*cells)
    return table


def line(*parts: str | Text | tuple[str, str], style: str = "") -> Text:
    """A line that is never wrapped, however narrow the console (which must not crop either)."""
    return Text.assemble(*parts, style=style, no_wrap=True, overflow="ignore")


def _safe(cell: str | Text) -> str | Text:
    """A cell without escape sequences."""
    text = printable(str(cell))
    return cell if text == str(cell) else text


def with_rest(table: Table, rows: int) -> Table:
    """Adds a line below a table that says how many of the `rows` in all it does not show, if any."""
    if rows > table.row_count:
        table.add_row("", Text(f"and {rows - table.row_count} more", "dim"))
    return table
