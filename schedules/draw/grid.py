"""Programs as text: one row per rank."""

from __future__ import annotations

from bisect import bisect_left
from typing import NamedTuple

from pentad.schedules.ir.instruction import Instruction, Op
from pentad.schedules.ir.program import Program
from pentad.schedules.simulate.costs import Costs
from pentad.schedules.simulate.timeline import Span, Timeline

MARK = "'"
CONTEXT = 6  # columns on each side of the marked one


class Cell(NamedTuple):
    """What a rank computes in one column of a time grid: `text` is its label in the first column, then dashes.

    `chunk` is the rank's chunk, or the direction, and `microbatch` is as in the label. An idle cell has no op.
    """

    text: str = "."
    op: str = ""
    microbatch: int = -1
    chunk: int = 0


def time_grid(program: Program, timeline: Timeline, costs: Costs) -> str:
    """Compute over time: a cell is as long as the shortest instruction, `.` is idle, `R` is RECOMPUTE, BW is B then W.

    A rank's first chunk has capital letters, its second small ones, later chunks the same with marks: F0 f0 F'0 f'0.
    With two directions (DualPipe), microbatches that enter at the last rank have small letters and count from 0.
    """
    rows = time_cells(program, timeline, costs)
    width = max(len(cell.text) for row in rows for cell in row)
    return "\n".join(" ".join(cell.text.rjust(width) for cell in row) for row in rows)


def time_cells(program: Program, timeline: Timeline, costs: Costs) -> list[list[Cell]]:
    """The cells of `time_grid`, up to each rank's last instruction."""
    rows: list[list[tuple[float, float, Cell]]] = [[] for _ in range(program.ranks)]
    for span in timeline.compute:
        parts = [(span.start, span.end, span.op)]
        if span.op == Op.BW:
            middle = span.start + costs.seconds_on(span.rank, Instruction(Op.B, span.stage, span.microbatch))
            parts = [(span.start, middle, "B"), (middle, span.end, "W")]
        rows[span.rank] += [(start, end, _cell(program, span, op)) for start, end, op in parts]
    unit = min(end - start for row in rows for start, end, _ in row)
    columns = round(max(end for row in rows for _, end, _ in row) / unit)
    centres = [(column + 0.5) * unit for column in range(columns)]
    return [_sampled(row, centres) for row in rows]


def order_grid(program: Program, mark: tuple[int, int]) -> str:
    """Instructions in stream order, with `mark` = (rank, index) in >arrows< and CONTEXT columns on each side of it."""
    first = max(mark[1] - CONTEXT, 0)
    rows = []
    for r, stream in enumerate(program.streams):
        cells = [f">{u.key}<" if (r, i) == mark else str(u.key) for i, u in enumerate(stream)]
        rows.append([f"rank {r}:", *(["..."] if first else []), *cells[first : first + 2 * CONTEXT + 1]])
    width = max((len(cell) for row in rows for cell in row), default=0)
    return "\n".join(" ".join(cell.ljust(width) for cell in row).rstrip() for row in rows)


def letter(op: str) -> str:
    """How drawings abbreviate a compute op."""
    return "R" if op == Op.RECOMPUTE else op


def _cell(program: Program, span: Span, op: str) -> Cell:
    if len(program.holders(span.stage)) > 1:  # two directions
        half = program.microbatches // 2
        chunk, microbatch = divmod(span.microbatch, half) if half else (0, span.microbatch)
    else:
        chunk, microbatch = program.placement[span.rank].index(span.stage), span.microbatch
    name = letter(op).lower() if chunk % 2 else letter(op)
    return Cell(f"{name}{MARK * (chunk // 2)}{microbatch}", op, microbatch, chunk)


def _sampled(spans: list[tuple[float, float, Cell]], centres: list[float]) -> list[Cell]:
    """What runs at the centre of each column."""
    row = [Cell()] * len(centres)
    for start, end, cell in sorted(spans):
        for column in range(first := bisect_left(centres, start), bisect_left(centres, end)):
            row[column] = cell if column == first else cell._replace(text="-" * len(cell.text))
    while row and not row[-1].op:
        row.pop()
    return row
