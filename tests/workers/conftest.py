"""Files of small models, saved by transformers."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def silent_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank in this process leaves its progress file behind as the log of waits."""
    if async_ops := sys.modules.get("pentad.workers.parallel.async_ops"):
        monkeypatch.setattr(async_ops.host_waits, "log", None)


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The files of a model; do not change them."""
    import hf_models  # imports transformers, which takes seconds

    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            made[name] = hf_models.save(hf_models.make(name), tmp_path_factory.mktemp(name))
        return made[name]

    return get
