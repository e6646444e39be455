"""The command line, called in this process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pentad.orchestrator.cli.cli import main

SIZES = ("--ranks", "4", "--microbatches", "8")
Pentad = Callable[..., tuple[int, str, str]]


@pytest.fixture
def pentad(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Pentad:
    """Runs a command line in an empty folder: (status, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FORCE_COLOR", raising=False)

    def run(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        status = main(list(arguments))
        return status, *capsys.readouterr()

    return run
