"""Places for checkpoints: a folder, stores in this process, and a real one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pentad.workers.checkpoint.location import Location, RemotePath
from pentad.workers.checkpoint.storage import read_bytes, storage_of


def place(kind: str, folder: Path) -> Location:
    """The `folder` itself, or a store that pyarrow opens with its files in there."""
    return RemotePath.from_uri(f"file://{folder}") if kind == "store" else folder


def change(file: Location, damage: Callable[[bytes], bytes]) -> None:
    """Replaces the content of a file."""
    content = damage(read_bytes(file))
    storage_of(file).write(file, [memoryview(content)])


def shards_in(folder: Location) -> list[Location]:
    return [folder / name for name in sorted(storage_of(folder).files(folder)) if name.endswith(".safetensors")]


def without_grace(monkeypatch: pytest.MonkeyPatch, root: Location) -> None:
    """Makes files that no manifest lists count as abandoned at once."""
    if not isinstance(root, Path):
        monkeypatch.setattr(storage_of(root), "grace_seconds", 1e-9)
