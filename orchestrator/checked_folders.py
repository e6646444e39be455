"""Checks folders of models and corpora that users name: all files must be regular and readable."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from pentad.schedules.ir.errors import PentadError
from pentad.schedules.ir.regular_files import MOST_JSON, expanded, regular_file

DCP_METADATA = ".metadata"
_SMALL = (".json", ".crc32", ".jinja", ".py", ".txt")


def checked_folder(folder: Path) -> Path:
    """Returns the folder of a model or a corpus. Raises PentadError if a file in it, hidden ones aside, is a pipe, a
    device or a dangling link, or if a file of a usually small kind has more than MOST_JSON bytes."""
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if path.name.startswith(".") and path.name != DCP_METADATA:
            continue
        try:
            path.stat()
        except OSError as error:
            raise PentadError(f"{path} cannot be read ({error.strerror}): expected a file") from None
        regular_file(path, MOST_JSON if path.suffix in _SMALL or path.name == DCP_METADATA else None)
    return folder


def check_corpora(paths: Iterable[str]) -> None:
    """Raises PentadError for a corpus on this machine that contains such files."""
    for path in paths:
        if "://" not in path and not path.startswith("builtin:"):
            checked_folder(expanded(path))
