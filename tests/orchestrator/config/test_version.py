"""`pentad --version`."""

from __future__ import annotations

import tomllib

import pytest
from paths import ROOT

from pentad.orchestrator.cli.cli import main
from pentad.orchestrator.config.version import release


def test_the_printed_version_is_the_package_version(capsys: pytest.CaptureFixture[str]) -> None:
    expected = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"pentad {release()}\n"
    assert release() in (expected, "checkout")
