"""Programs as text: one row per rank."""

from __future__ import annotations

from collections.abc import Callable

from pentad.schedules.ir.instruction import Instruction, Op
from pentad.schedules.ir.program import Program
from pentad.schedules.simulate.costs import Costs
from pentad.schedules.simulate.timeline import COMPUTE, Timeline

Cell = tuple[float, float, str]
MARK = "'"


def time_grid(program: Program, timeline: Timeline, costs: Costs) -> str:
    """Compute over time: a cell is as long as the shortest instruction, `.` is idle, `R` is RECOMPUTE, BW is B then W.

    A rank's first chunk has capital letters, its second small ones, later chunks the same with marks: F0 f0 F'0 f'0.
    With two directions (DualPipe), microbatches that enter at the last rank have small letters and count from 0.
    """
    rows = [_cells(program, timeline, costs, rank) for rank in range(program.ranks)]
    unit = min(end - start for row in rows for start, end, _ in row)
    columns = round(max(end for row in rows for _, end, _ in row) / unit)
    drawn = [_sampled(row, unit, columns) for row in rows]
    width = max(len(cell) for row in drawn for cell in row)
    return "\n".join(" ".join(cell.rjust(width) for cell in row).rstrip(" .") for row in drawn)


def order_grid(program: Program, *, mark: tuple[int, int] = (-1, -1), around: int = 6) -> str:
    """Instructions in stream order, with `mark` = (rank, index) in >arrows< and `around` columns on each side of it."""
    _, index = mark
    first = max(index - around, 0) if index >= 0 else 0
    rows = []
    for r, stream in enumerate(program.streams):
        cells = [f">{u.key}<" if (r, i) == mark else str(u.key) for i, u in enumerate(stream)]
        rows.append([f"rank {r}:", *(["..."] if first else []), *cells[first : first + 2 * around + 1]])
    width = max((len(cell) for row in rows for cell in row), default=0)
    return "\n".join(" ".join(cell.ljust(width) for cell in row).rstrip() for row in rows)


def _cells(program: Program, timeline: Timeline, costs: Costs, rank: int) -> list[Cell]:
    cells: list[Cell] = []
    for span in timeline.spans:
        if span.rank != rank or span.op not in COMPUTE:
            continue
        label = _label(program, rank, span.stage, span.microbatch)
        if span.op == Op.BW:
            middle = span.start + costs.seconds_on(rank, Instruction(Op.B, span.stage, span.microbatch))
            cells += [(span.start, middle, label("B")), (middle, span.end, label("W"))]
        else:
            cells.append((span.start, span.end, label(letter(span.op))))
    return cells


def _label(program: Program, rank: int, stage: int, microbatch: int) -> Callable[[str], str]:
    if len(program.holders(stage)) > 1:  # two directions
        half = program.microbatches // 2
        chunk, microbatch = divmod(microbatch, half) if half else (0, microbatch)
    else:
        chunk = program.placement[rank].index(stage)
    return lambda op: f"{op.lower() if chunk % 2 else op}{MARK * (chunk // 2)}{microbatch}"


def chunk_of(cell: str) -> int:
    """The chunk, or the direction, of a cell of a `time_grid`."""
    return 2 * cell.count(MARK) + cell[0].islower()


def letter(op: str) -> str:
    """How drawings abbreviate a compute op."""
    return "R" if op == Op.RECOMPUTE else op


def _sampled(cells: list[Cell], unit: float, columns: int) -> list[str]:
    row = ["."] * columns
    for start, end, label in sorted(cells):
        covered = [k for k in range(columns) if start <= (k + 0.5) * unit < end]
        for place, k in enumerate(covered):
            row[k] = label if place == 0 else "-" * len(label)
    return row
