"""Timelines on a terminal: one row per rank, in colour if the terminal supports it."""

from __future__ import annotations

from rich.console import Console
from rich.style import Style
from rich.text import Text

from pentad.schedules.draw.grid import Cell, letter
from pentad.schedules.draw.palette import OP_STYLES, op_style, shades, text_colour
from pentad.schedules.simulate.timeline import Span, Timeline, grouped


def is_coloured(console: Console) -> bool:
    return console.is_terminal and not console.no_color and console.color_system is not None


def bars(timeline: Timeline, width: int, *, coloured: bool, seconds: float = 0.0) -> list[Text]:
    """One line per rank of `timeline`, in rank order; `width` characters are `seconds`, or its makespan if longer.

    A bar shows as much of its instruction's letter and microbatch as fits. Stages other than the rank's first are in
    lower case and have shades of their own. Without colours, bars are filled with '-' and idle time with '.'.
    """
    first = min(span.start for span in timeline.compute)
    scale = width / max(timeline.makespan, seconds, 1e-12)
    by_rank = grouped(sorted(timeline.compute, key=lambda span: span.start), lambda span: span.rank)
    return [_row(by_rank.get(rank, []), first, scale, width, coloured) for rank in timeline.ranks]


def coloured_grid(rows: list[list[Cell]]) -> list[Text]:
    """The lines of a `time_grid`, with every cell in the colour of its op and the shade of its chunk."""
    width = max(len(cell.text) for row in rows for cell in row)
    chunks = 1 + max(cell.chunk for row in rows for cell in row)

    def coloured(cell: Cell) -> Text:
        style = _style(cell.op, cell.microbatch, cell.chunk, chunks) if cell.op else ""
        return Text.assemble(" " * (width - len(cell.text)), (cell.text, style))

    return [Text(" ", no_wrap=True).join(map(coloured, row)) for row in rows]


def legend(timeline: Timeline, *, coloured: bool) -> Text:
    """A legend such as 'F forward  B backward, input ...' for the ops in the bars of `timeline`."""
    text, used = Text(), {span.op for span in timeline.compute}
    for op in (op for op in OP_STYLES if op in used):
        text.append(f" {letter(op)} ", _style(op, 0) if coloured else "bold")
        text.append(f" {op_style(op).label}   ", "dim")
    return text


def _row(spans: list[Span], first: float, scale: float, width: int, coloured: bool) -> Text:
    stages = list(dict.fromkeys(span.stage for span in spans))  # in order of their first span
    row = Text(no_wrap=True)
    drawn = 0
    for span in spans:
        start, end = round((span.start - first) * scale), min(round((span.end - first) * scale), width)
        if end <= max(start, drawn):
            continue
        row.append((" " if coloured else ".") * (start - drawn))
        label, chunk = f"{letter(span.op)}{span.microbatch}", stages.index(span.stage)
        label, size = label.lower() if chunk else label, end - max(start, drawn)
        shown = label if len(label) <= size else label[:1]
        style = _style(span.op, span.microbatch, chunk, len(stages)) if coloured else ""
        row.append(shown.ljust(size, " " if coloured else "-"), style)
        drawn = end
    row.append((" " if coloured else ".") * (width - drawn))
    return row


def _style(op: str, microbatch: int, chunk: int = 0, chunks: int = 1) -> Style:
    """The colours of a bar; odd microbatches are darker so that neighbouring bars can be told apart."""
    fill = shades(op, "dark", chunks)[chunk]
    if microbatch % 2:
        fill = "#" + "".join(f"{round(int(fill[i : i + 2], 16) * 0.82):02x}" for i in (1, 3, 5))
    return Style(color=text_colour(fill), bgcolor=fill)
