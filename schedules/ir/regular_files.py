"""Refuses, in one sentence, files named by users or other programs that cannot be read safely: a pipe or device may
never end, and a sparse file that takes a few bytes on disk may fill memory."""

from __future__ import annotations

import stat
from pathlib import Path

from pentad.schedules.ir.errors import PentadError

MOST_BYTES = 1 << 30  # of a file that is read at once
MOST_JSON = 1 << 28  # of a file that is parsed


def expanded(path: str | Path) -> Path:
    """The path with a leading ~ replaced by the home folder. Raises PentadError if there is none."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        home = str(path).partition("/")[0]
        expected = "a path without ~" + ", or HOME to be set" * (home == "~")
        raise PentadError(f"'{path}' is in {home}, a home folder that is not known: expected {expected}") from None


def regular_file(path: Path, most: int | None = MOST_BYTES) -> Path:
    """Returns the path. Raises PentadError for a pipe or a device, and for a file of more than `most` bytes; other
    faults are left to whoever reads the file."""
    try:
        status = path.stat()
    except (OSError, ValueError):
        return path
    if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
        raise PentadError(f"{path} is a pipe or device: expected a file")
    if most is not None and stat.S_ISREG(status.st_mode) and status.st_size > most:
        raise PentadError(f"{path} has {status.st_size} bytes: expected at most {most}")
    return path
