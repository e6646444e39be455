"""What users and other programs name as files: regular ones of a size that can be read, or one sentence. A pipe or a
device may never end; a sparse file of a few bytes on the disk may fill the memory."""

from __future__ import annotations

import stat
from collections.abc import Iterable
from pathlib import Path

from pentad.schedules.ir.errors import PentadError

MOST_BYTES = 1 << 30  # of a file that is read whole
MOST_JSON = 1 << 28  # or parsed
_SMALL = (".json", ".crc32", ".jinja", ".py", ".txt")


def plain_file(path: Path, most: int | None = MOST_BYTES) -> Path:
    """The path. Raises PentadError for a pipe or a device, and for more than `most` bytes; what is wrong otherwise, who
    reads the file will say."""
    try:
        status = path.stat()
    except (OSError, ValueError):
        return path
    if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
        raise PentadError(f"{path} is a pipe or device: expected a file")
    if most is not None and stat.S_ISREG(status.st_mode) and status.st_size > most:
        raise PentadError(f"{path} has {status.st_size} bytes: expected at most {most}")
    return path


def plain_folder(folder: Path) -> Path:
    """The folder of a model or a corpus. Raises PentadError if a file in it is a pipe or a device, or a link that leads
    nowhere, or one of a kind that is small and has more than MOST_JSON bytes."""
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        try:
            path.stat()
        except OSError as error:
            raise PentadError(f"{path} cannot be read ({error.strerror}): expected a file") from None
        plain_file(path, MOST_JSON if path.suffix in _SMALL or path.name == ".metadata" else None)
    return folder


def check_user_file(name: str) -> None:
    """Raises PentadError if FILE.py:FUNCTION, FILE.csv or FILE.arrow is no file that can be read whole."""
    file = name.rpartition(":")[0] or name
    if file.endswith((".py", ".csv", ".arrow")):
        plain_file(Path(file), MOST_JSON)


def check_corpora(paths: Iterable[str]) -> None:
    """Raises PentadError for a corpus on this machine with such files."""
    for path in paths:
        if "://" not in path and not path.startswith("builtin:"):
            plain_folder(Path(path).expanduser())
