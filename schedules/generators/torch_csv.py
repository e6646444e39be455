"""Reads and writes compute orders as CSV of torch.distributed.pipelining: a row per rank such as `2F0,2I0,2W0`."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator
from pathlib import Path

from pentad.schedules.generators.custom import with_inferred_placement
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.ir.instruction import Action, Instruction, Op, Overlap, instructions_of
from pentad.schedules.ir.plain_files import MOST_JSON, plain_file
from pentad.schedules.ir.program import Program

_LETTERS = {Op.F: "F", Op.B: "I", Op.W: "W", Op.BW: "B"}
_OPS = {letter: op for op, letter in _LETTERS.items()}
_COMPUTE = re.compile(r"\d{1,9}[FIWB]\d{1,9}", re.ASCII)
_PAIR = re.compile(r"\((\d{1,9}F\d{1,9});(\d{1,9}[IB]\d{1,9})\)OVERLAP_F_B", re.ASCII)
_LOWERED = re.compile(r"\d+(?:(?:SEND|RECV)_[FB]\d+|UNSHARD|RESHARD|REDUCE_GRAD)", re.ASCII)
_EXPECTED = "nothing, or STAGE LETTER MICROBATCH as torch.distributed.pipelining writes: 2F0, 2I0, 2W0 or 2B0"


def torch_csv(program: Program) -> str:
    """The content of the file. torch itself refuses programs in which two ranks hold a stage (DualPipe). Raises
    PentadError for sequence slices, which the format cannot express."""
    if program.slices > 1:
        found = f"schedule {program.name} cuts sequences into {program.slices} slices"
        raise PentadError(f"{found}: expected 1, because torch's CSV has no slices")
    return "".join(",".join(map(_cell, stream)) + "\n" for stream in program.compute().streams)


def read(path: Path) -> Program:
    """The compute order in a file that `torch_csv` or torch wrote, without idle cells and what torch's lowering added.

    A rank holds the stages that its row runs. Raises PentadError for any other file.
    """
    rows = [_actions(path, number, row) for number, row in _rows(path)]
    if not rows:
        raise PentadError(f"{path} is empty: expected a row per rank, with cells such as 2F0")

    def describe(rank: int, at: int) -> str:
        return f"row {rank + 1}, column {rows[rank][at][0]}"

    streams = tuple(tuple(action for _, action in row) for row in rows)
    microbatches = {part.microbatch for stream in streams for part in instructions_of(stream)}
    return with_inferred_placement(str(path), streams, len(microbatches), describe)


def _cell(action: Action) -> str:
    if isinstance(action, Instruction):
        return f"{action.stage}{_LETTERS[action.op]}{action.microbatch}"
    return f"({_cell(action.forward)};{_cell(action.backward)})OVERLAP_F_B"


def _rows(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Row numbers, from 1, and cells."""
    plain_file(path, MOST_JSON)
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise PentadError(f"{path} is not UTF-8 text (byte {error.start}): expected a CSV file") from None
    except OSError as error:
        raise PentadError(f"{path} cannot be read ({error.strerror}): expected a CSV file") from None
    rows = csv.reader(io.StringIO(text, newline=""))
    try:
        yield from enumerate(rows, start=1)
    except csv.Error as error:
        raise PentadError(f"{path}, line {rows.line_num} is not CSV ({error}): expected cells such as 2F0") from None


def _actions(path: Path, number: int, row: list[str]) -> list[tuple[int, Action]]:
    """Columns, from 1, and actions."""
    found = []
    for column, cell in enumerate(map(str.strip, row), start=1):
        action = _action(cell)
        if action:
            found.append((column, action))
        elif cell and not _LOWERED.fullmatch(cell):
            shown = cell if len(cell) <= 40 else cell[:37] + "..."
            raise PentadError(f"{path}, row {number}, column {column} holds {shown!r}: expected {_EXPECTED}")
    if not found:
        raise PentadError(f"{path}, row {number} runs nothing: expected the compute instructions of rank {number - 1}")
    return found


def _action(cell: str) -> Action | None:
    if pair := _PAIR.fullmatch(cell):
        return Overlap(_instruction(pair[1]), _instruction(pair[2]))
    return _instruction(cell) if _COMPUTE.fullmatch(cell) else None


def _instruction(cell: str) -> Instruction:
    stage, letter, microbatch = re.split("([FIWB])", cell)
    return Instruction(_OPS[letter], int(stage), int(microbatch))
