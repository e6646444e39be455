"""`pytest tests/chaos --seed N` replays one history. The fixture `current` holds the simulation the driver uses."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from tempfile import mkdtemp

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, help="the one history of tests/chaos to play")


@pytest.fixture(scope="session")
def memory() -> Iterator[Path]:
    """A folder in memory if possible, since a history writes some hundred files."""
    shared = Path("/dev/shm")
    folder = Path(mkdtemp(prefix="pentad-chaos-", dir=shared if shared.is_dir() else None))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> list:
    """A list that holds the running history's simulation. Ray, time and storage are simulated meanwhile."""
    from chaos_history import Simulation
    from chaos_install import install

    found: list[Simulation] = []
    install(monkeypatch, lambda: found[0])
    return found
