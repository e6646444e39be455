"""A disk that does not respond, like a file server that is down: whoever uses a file waits."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


class HangingDisk:
    """Holds the files of a run's folder, except for its checkpoints. While it `hangs`, opening, renaming, syncing or
    looking up one of them blocks."""

    def __init__(self, patch: pytest.MonkeyPatch, folder: Path) -> None:
        self.folder, self.answers = folder.absolute(), threading.Event()
        self.answers.set()
        for owner, names in ((Path, ("open", "stat", "glob", "mkdir", "unlink")), (os, ("replace", "truncate"))):
            for name in names:
                patch.setattr(owner, name, self._waiting(getattr(owner, name), lambda path: self._has(path)))
        for name in ("fsync", "pwrite"):
            patch.setattr(os, name, self._waiting(getattr(os, name), self._has_open))

    @property
    def hangs(self) -> bool:
        return not self.answers.is_set()

    @hangs.setter
    def hangs(self, value: bool) -> None:
        (self.answers.clear if value else self.answers.set)()

    def _waiting(self, function: Callable[..., Any], is_here: Callable[[Any], bool]) -> Callable[..., Any]:
        def call(where: Any, *rest: Any, **named: Any) -> Any:
            if self.hangs and is_here(where):
                self.answers.wait()
            return function(where, *rest, **named)

        return call

    def _has(self, path: Any) -> bool:
        path = Path(os.path.abspath(path))
        return path.is_relative_to(self.folder) and "checkpoints" not in path.parts

    def _has_open(self, descriptor: int) -> bool:
        return self._has(os.readlink(f"/proc/self/fd/{descriptor}"))
