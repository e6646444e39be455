"""Timelines in a terminal: one row per rank, coloured if the terminal has colours."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise

from rich.console import Console
from rich.style import Style
from rich.text import Text

from pentad.schedules.draw.grid import chunk_of, letter
from pentad.schedules.draw.palette import BACKGROUNDS, LOOKS, look, shades, text_colour
from pentad.schedules.simulate.timeline import Span, Timeline

_BLOCKS = "▁▂▃▄▅▆▇█"
_LETTERS = {letter(op): op for op in LOOKS}
_CELL = re.compile(r"[A-Za-z]+'*\d+|-+|\.|\s+")


def is_coloured(console: Console) -> bool:
    return console.is_terminal and not console.no_color and console.color_system is not None


def bars(timeline: Timeline, width: int, *, coloured: bool, seconds: float = 0.0) -> list[Text]:
    """One line per rank of `timeline`, in rank order; `width` characters are `seconds`, or its makespan if longer.

    A bar shows as much of the letter and microbatch of its instruction as fits, in lower case for stages other than the
    rank's first, which also have shades of their own. Without colours bars are filled with '-' and idle time is '.'.
    """
    first = min(span.start for span in timeline.compute)
    scale = width / max(timeline.makespan, seconds, 1e-12)
    by_rank: dict[int, list[Span]] = {rank: [] for rank in timeline.ranks}
    for span in timeline.compute:
        by_rank[span.rank].append(span)
    return [_row(sorted(spans, key=lambda s: s.start), first, scale, width, coloured) for spans in by_rank.values()]


def coloured_grid(grid: str) -> list[Text]:
    """The lines of a `time_grid`, every cell in the colour of its op and the shade of its chunk."""
    chunks = 1 + max((chunk_of(cell) for cell in _CELL.findall(grid) if cell[0].isalpha()), default=0)
    return [_coloured_line(line, chunks) for line in grid.splitlines()]


def legend(ops: Sequence[str], *, coloured: bool) -> Text:
    """'F forward  B backward, input ...' for the ops of a drawing."""
    text = Text()
    for op in ops:
        text.append(f" {letter(op)} ", _style(op, 0) if coloured else "bold")
        text.append(f" {look(op).label}   ", "dim")
    return text


def sparkline(values: Sequence[float], width: int) -> str:
    """`values` as a line of at most `width` blocks; a block is the mean of neighbouring values."""
    count = min(width, len(values))
    edges = [len(values) * i // count for i in range(count + 1)] if count else [0]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means, default=0.0), max(means, default=0.0)
    spread = (high - low) or 1.0
    return "".join(_BLOCKS[round((value - low) / spread * (len(_BLOCKS) - 1))] for value in means)


def _row(spans: list[Span], first: float, scale: float, width: int, coloured: bool) -> Text:
    stages = list(dict.fromkeys(span.stage for span in spans))  # in order of their first span
    row = Text(no_wrap=True)
    drawn = 0
    for span in spans:
        start, end = round((span.start - first) * scale), min(round((span.end - first) * scale), width)
        if end <= max(start, drawn):
            continue
        row.append((" " if coloured else ".") * (start - drawn))
        label = f"{letter(span.op)}{span.microbatch}"
        chunk = stages.index(span.stage)
        label = label.lower() if chunk else label
        size = end - max(start, drawn)
        shown = label if len(label) <= size else label[:1]
        row.append(
            shown.ljust(size, " " if coloured else "-"),
            _style(span.op, span.microbatch, chunk, len(stages)) if coloured else "",
        )
        drawn = end
    row.append((" " if coloured else ".") * (width - drawn))
    return row


def _coloured_line(line: str, chunks: int) -> Text:
    text = Text(no_wrap=True)
    style: Style | str = ""
    for cell in _CELL.findall(line):
        if cell[0].isalpha():
            op, microbatch = re.split(r"'*(?=\d)", cell, maxsplit=1)
            style = _style(_LETTERS[op.upper()], int(microbatch), chunk_of(cell), chunks)
        text.append(cell, style if cell[0].isalnum() or cell[0] == "-" else "")
    return text


def _style(op: str, microbatch: int, chunk: int = 0, chunks: int = 1) -> Style:
    """Odd microbatches are darker, so that neighbouring bars can be told apart."""
    fill = shades(look(op).dark, BACKGROUNDS[1], chunks)[chunk]
    if microbatch % 2:
        fill = "#" + "".join(f"{round(int(fill[i : i + 2], 16) * 0.82):02x}" for i in (1, 3, 5))
    return Style(color=text_colour(fill), bgcolor=fill)
