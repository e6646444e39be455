"""The README's first screen shows actual output."""

from __future__ import annotations

import pytest
from pages import blocks
from paths import ROOT

from pentad.orchestrator.cli.cli import main

README = ROOT / "README.md"


def test_the_first_grid_is_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schedule", "zb-h2", "--ranks", "4", "--microbatches", "8", "--grid"]) == 0
    assert blocks(README, "")[0].text.strip() in capsys.readouterr().out


@pytest.mark.parametrize("page", [README, ROOT / "docs" / "first-hour.md"])
def test_the_yaml_is_the_quickstart(page) -> None:
    assert blocks(page, "yaml")[0].text == (ROOT / "orchestrator" / "config" / "quickstart.yaml").read_text()


def test_the_readme_is_short() -> None:
    assert len(README.read_text().splitlines()) <= 120
