"""pentad says which one it is."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from pentad.orchestrator.cli import main
from pentad.orchestrator.release import release

ROOT = Path(__file__).resolve().parent.parent


def test_the_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"pentad {release()}\n"
    assert release() in (wanted, "checkout")
