"""What a sweep knows about each trial, as rows of `results.arrow` and `results.csv`."""

from __future__ import annotations

import csv
import io
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, NamedTuple, get_args, get_type_hints

import pyarrow as pa

from pentad.orchestrator.config.errors import shown
from pentad.orchestrator.records.json_lines import reported
from pentad.orchestrator.records.run_files import replace_file
from pentad.schedules.ir.arrow_file import file_bytes, read_table
from pentad.schedules.ir.errors import PentadError

Outcome = Literal["measured", "pruned", "memory", "deadline", "hang", "failed"]
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)
ARROW, CSV = "results.arrow", "results.csv"


class TrialRow(NamedTuple):
    """A trial: what it is, how it ended and why, what the planner predicted, and what was measured (medians over all
    steps but the first). None stands for unknown. `wall_seconds` is from its start to its end."""

    trial: str
    settings: str
    command: str
    outcome: Outcome = "pruned"
    cause: str = ""
    device: str = ""
    model: str = ""
    parameters: int | None = None
    layout: str = ""
    ranks: int | None = None
    dp: int | None = None
    pp: int | None = None
    cp: int | None = None
    tp: int | None = None
    ep: int | None = None
    schedule: str = ""
    microbatches: int | None = None
    sequences: int | None = None
    zero: int | None = None
    recompute: str = ""
    predicted_seconds: float | None = None
    predicted_bytes: int | None = None
    step_seconds: float | None = None
    tokens_per_second: float | None = None
    mfu: float | None = None
    bubble: float | None = None
    peak_bytes: int | None = None
    wall_seconds: float | None = None


_TYPES = {str: pa.string(), Outcome: pa.string(), int | None: pa.int64(), float | None: pa.float64()}
SCHEMA = pa.schema([(name, _TYPES[kind]) for name, kind in get_type_hints(TrialRow).items()])
_TEXTS = [field.name for field in SCHEMA if field.type == pa.string()]


@contextmanager
def writable(folder: Path) -> Iterator[None]:
    """Turns an OSError from writing to a sweep's folder into a PentadError."""
    try:
        yield
    except OSError as error:
        reason = f"--out is '{folder}', which cannot be written ({error.strerror or error})"
        raise PentadError(f"{reason}: expected a folder of yours, on a disk with room") from None


def write_rows(folder: Path, rows: Sequence[TrialRow]) -> None:
    """Writes both files, each atomically."""
    table = pa.table({name: [getattr(row, name) for row in rows] for name in TrialRow._fields}, schema=SCHEMA)
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([TrialRow._fields, *rows])
    with writable(folder):
        replace_file(folder / ARROW, file_bytes(table))
        replace_file(folder / CSV, text.getvalue().encode())


def read_rows(folder: Path) -> list[TrialRow]:
    """The rows of `results.arrow`, [] if there is no such file. Raises PentadError for a file that no sweep wrote."""
    path = folder / ARROW
    if not path.exists():
        return []
    with reported(path, "read"):
        data = path.read_bytes()
    try:
        table = read_table(data)
    except PentadError as error:
        raise _foreign(path, str(error)) from None
    if table.schema != SCHEMA:
        raise _foreign(path, "its columns are others")
    rows = [TrialRow(**row) for row in table.to_pylist()]
    for row in rows:
        nulls = [name for name in _TEXTS if getattr(row, name) is None]
        if nulls or row.outcome not in OUTCOMES:
            name = (*nulls, "outcome")[0]
            raise _foreign(path, f"{name} of trial {row.trial} is {shown(getattr(row, name))}")
    return rows


def _foreign(path: Path, why: str) -> PentadError:
    return PentadError(f"{path} is no table of trials ({why}): expected one that `pentad sweep` wrote, or none")


def best_first(rows: Iterable[TrialRow]) -> list[TrialRow]:
    """The measured trials, the fastest first."""
    return sorted((row for row in rows if row.tokens_per_second), key=lambda row: -(row.tokens_per_second or 0.0))


def merged(known: Iterable[TrialRow], new: Collection[TrialRow]) -> list[TrialRow]:
    """The `known` rows, replaced by `new` ones of the same trials, followed by the other new ones."""
    by_trial = {row.trial: row for row in known}
    return list((by_trial | {row.trial: row for row in new}).values())
