"""Timelines in a terminal: a row a rank, time to the right, coloured where the terminal has colours."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise

from rich.console import Console
from rich.style import Style
from rich.text import Text

from pentad.schedules.draw.grid import chunk_of, letter
from pentad.schedules.draw.palette import GROUNDS, LOOKS, ink, look, shades
from pentad.schedules.simulate.timeline import Span, Timeline

_BLOCKS = "▁▂▃▄▅▆▇█"
_LETTERS = {letter(op): op for op in LOOKS}
_CELL = re.compile(r"[A-Za-z]+'*\d+|-+|\.|\s+")


def is_coloured(console: Console) -> bool:
    return console.is_terminal and not console.no_color and console.color_system is not None


def bars(timeline: Timeline, width: int, *, coloured: bool, seconds: float = 0.0) -> list[Text]:
    """The compute of each rank of `timeline`, in rank order; `seconds` (its makespan if longer) fill `width` columns.

    A bar has the letter and microbatch of its instruction as far as there is room, small for stages other than the
    rank's first, and each of its stages a shade; without colours bars are filled with '-' and idle time is '.'.
    """
    first = min(span.start for span in timeline.compute)
    scale = width / max(timeline.makespan, seconds, 1e-12)
    by_rank: dict[int, list[Span]] = {rank: [] for rank in timeline.ranks}
    for span in timeline.compute:
        by_rank[span.rank].append(span)
    return [_row(sorted(spans, key=lambda s: s.start), first, scale, width, coloured) for spans in by_rank.values()]


def coloured_grid(grid: str) -> list[Text]:
    """The lines of a `time_grid`, every cell on the colour of its op and the shade of its chunk."""
    chunks = 1 + max((chunk_of(cell) for cell in _CELL.findall(grid) if cell[0].isalpha()), default=0)
    return [_coloured_line(line, chunks) for line in grid.splitlines()]


def legend(ops: Sequence[str], *, coloured: bool) -> Text:
    """'F forward  B backward, input ...' for the ops that a drawing has."""
    text = Text()
    for op in ops:
        text.append(f" {letter(op)} ", _style(op, 0) if coloured else "bold")
        text.append(f" {look(op).label}   ", "dim")
    return text


def sparkline(values: Sequence[float], width: int) -> str:
    """`values` as a line of at most `width` blocks, each the mean of as many neighbours as it takes."""
    count = min(width, len(values))
    edges = [len(values) * k // count for k in range(count + 1)] if count else [0]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means, default=0.0), max(means, default=0.0)
    spread = (high - low) or 1.0
    return "".join(_BLOCKS[round((value - low) / spread * (len(_BLOCKS) - 1))] for value in means)


def _row(spans: list[Span], first: float, scale: float, width: int, coloured: bool) -> Text:
    stages = list(dict.fromkeys(span.stage for span in spans))  # in the order of their first turns
    row = Text(no_wrap=True)
    at = 0
    for span in spans:
        start, end = round((span.start - first) * scale), min(round((span.end - first) * scale), width)
        if end <= max(start, at):
            continue
        row.append((" " if coloured else ".") * (start - at))
        label = f"{letter(span.op)}{span.microbatch}"
        chunk = stages.index(span.stage)
        label = label.lower() if chunk else label
        size = end - max(start, at)
        shown = label if len(label) <= size else label[:1]
        row.append(
            shown.ljust(size, " " if coloured else "-"),
            _style(span.op, span.microbatch, chunk, len(stages)) if coloured else "",
        )
        at = end
    row.append((" " if coloured else ".") * (width - at))
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
    """Neighbouring microbatches differ a little, so that their bars do not melt into one."""
    fill = shades(look(op).dark, GROUNDS[1], chunks)[chunk]
    if microbatch % 2:
        fill = "#" + "".join(f"{round(int(fill[i : i + 2], 16) * 0.82):02x}" for i in (1, 3, 5))
    return Style(color=ink(fill), bgcolor=fill)
