"""Fixtures for several folders: files of small models, corpora, ranks with random groups."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from fleet import Fleet


@pytest.fixture(autouse=True)
def silent_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Resets the log of waits, which a rank in this process leaves set to its progress file."""
    if async_ops := sys.modules.get("pentad.workers.parallel.async_ops"):
        monkeypatch.setattr(async_ops.host_waits, "log", None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for the corpora of one test file."""
    return tmp_path_factory.mktemp("corpora")


@pytest.fixture(scope="module")
def random_fleet() -> Iterator[Fleet]:
    from random_groups import RandomGroupsFleet

    made = RandomGroupsFleet(4)
    yield made
    made.stop()


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
