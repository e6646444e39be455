"""A folder that is made whole or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pentad.schedules.ir.errors import PentadError


@contextmanager
def fresh_folder(out: Path) -> Iterator[None]:
    """Creates `out`, which must be new or empty, with its parents; where the block fails, all of it is gone again.

    A failing storage becomes one PentadError.
    """
    try:
        if os.path.lexists(out) and not (out.is_dir() and not any(out.iterdir())):
            raise PentadError(f"OUT is '{out}', which exists and is not empty: expected a new or an empty folder")
        top, kept = out, out.exists()
        while not top.parent.exists():
            top = top.parent
        out.mkdir(parents=True, exist_ok=True)
        try:
            yield
        except BaseException:
            shutil.rmtree(top, ignore_errors=True)
            if kept:
                out.mkdir()
            raise
    except OSError as error:
        reason = error.strerror or str(error)
        raise PentadError(f"OUT is '{out}', which cannot be written ({reason}): expected a folder with room") from None
