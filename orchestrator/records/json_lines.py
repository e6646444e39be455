"""The JSON-lines files that a run appends to. Readers get complete lines with values of the kinds that pentad writes,
or an error of one sentence."""

from __future__ import annotations

import errno
import io
import itertools
import json
import math
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from pentad.orchestrator.records.json_rows import checked_row
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.ir.regular_files import regular_file
from pentad.workers.checkpoint.atomic_io import FULL, free_bytes

MOST_OF_LINE = 1 << 27  # bytes; a place event of 65,536 ranks has about 8 MB


def read_lines(path: Path, keys: Iterable[str] = ()) -> list[dict[str, Any]]:
    """The objects of a JSON-lines file, [] if there is none; an incomplete last line, left by a crash, is dropped.

    Raises PentadError for any other line that is not a JSON object with `keys` and values of their kinds.
    """
    return [_row(line, f"{path} line {number}", keys) for number, line in enumerate(complete_lines(path), 1)]


def complete_lines(path: Path) -> Iterator[bytes]:
    """The lines of a file, none if there is no file, without an incomplete last one. Raises PentadError."""
    with reported(path, "read"):
        if not path.exists():
            return
        with regular_file(path, None).open("rb") as file:
            for number in itertools.count(1):
                line = file.readline(MOST_OF_LINE)
                if not line.endswith(b"\n"):
                    return _check_length(line, f"{path} line {number}")
                yield line[:-1]


def lines_before(path: Path, step: int) -> bytes:
    """The lines of a file, in ascending order of steps, that come before `step`. Raises PentadError for a line without
    a step."""
    with reported(path, "read"):
        lines = regular_file(path, None).read_bytes().splitlines(keepends=True) if path.exists() else []
    while lines and _row(lines[-1], f"{path} line {len(lines)}", ["step"])["step"] >= step:
        lines.pop()
    return b"".join(lines)


def append(path: Path, lines: str, size: int) -> None:
    """Appends lines to a file. If an earlier attempt has left a beginning of them after the first `size` bytes, that is
    cut off first.

    If a full disk or Ctrl-C interrupts it, what was written is cut off if possible: part of a line would spoil the next
    one.
    """
    data = lines.encode()
    with reported(path), path.open("a+b", buffering=0) as file:
        file.seek(size)
        if (left := file.read(len(data) + 1)) and data.startswith(left):
            file.truncate(size)
        end = file.seek(0, os.SEEK_END)
        try:
            _write_all(file, data)
        except BaseException:
            with suppress(OSError):
                file.truncate(end)
            raise


def size_of(path: Path) -> int:
    """Bytes of a file, 0 if there is none."""
    with reported(path, "read"):
        return path.stat().st_size if path.exists() else 0


def trim(path: Path) -> bytes:
    """Cuts off an incomplete last line, left by a crash. Returns the last complete line, b'' if there is none."""
    with reported(path):
        if not path.exists():
            return b""
        with regular_file(path, None).open("rb+") as file:
            start = max(0, file.seek(0, os.SEEK_END) - 2 * MOST_OF_LINE)
            file.seek(start)
            text = file.read()
            end = text.rfind(b"\n") + 1
            _check_length(text[end:], f"the last line of {path}")
            file.truncate(start + end)
        return text[text.rfind(b"\n", 0, max(0, end - 1)) + 1 : end]


def line_of(row: dict[str, Any]) -> str:
    """A row as a line of JSON."""
    return json.dumps({key: _json_value(value) for key, value in row.items()}, allow_nan=False) + "\n"


@contextmanager
def reported(path: Path, verb: str = "written") -> Iterator[None]:
    """Turns an OSError of a run's file into a PentadError."""
    try:
        yield
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        reason += f", {free_bytes(path)} bytes free" if error.errno == errno.ENOSPC else ""
        expected = "run.folder with room" if error.errno in FULL else f"file that can be {verb}"
        raise PentadError(f"{path} cannot be {verb} ({reason}): expected a {expected}") from None


def _check_length(line: bytes, where: str) -> None:
    if len(line) >= MOST_OF_LINE:
        raise PentadError(f"{where} has {MOST_OF_LINE} bytes or more: expected less: repair or remove the line")


def _row(line: bytes, where: str, keys: Iterable[str]) -> dict[str, Any]:
    advice = "repair or remove the line"
    try:
        row = json.loads(line.decode())  # given bytes, json would guess the encoding
    except (ValueError, RecursionError) as error:
        raise PentadError(f"{where} is not JSON ({error}): expected an object: {advice}") from None
    missing = [key for key in keys if key not in row] if isinstance(row, dict) else [*keys]
    if missing or not isinstance(row, dict):
        raise PentadError(f"{where} is {line[:60]!r}: expected an object with {', '.join(missing)}: {advice}")
    return checked_row(row, where)


def _write_all(file: io.FileIO, data: bytes) -> None:
    while data:
        data = data[file.write(data) :]


def _json_value(value: Any) -> Any:
    """The value, with None for non-finite numbers, which JSON lacks."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
