"""What docs/custom-model.md shows is what happens: its code is run, its commands print what stands below them."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from paths import ROOT, TESTS

from pentad.orchestrator.cli.cli import main

PAGE = (ROOT / "docs" / "custom-model.md").read_text()
BLOCKS = re.findall(r"^```(python|console)\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
CODE = "\n\n".join(block for kind, block in BLOCKS if kind == "python")
MOST_LINES = 60


@pytest.mark.timeout(300)
@pytest.mark.parametrize("number", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_every_command_prints_what_the_page_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: int
) -> None:
    """Three dots stand for what is left out. The second command trains."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.py").write_text(CODE)
    command, *shown = [block for kind, block in BLOCKS if kind == "console"][number].splitlines()
    _, program, *arguments = shlex.split(command)
    assert (command[:2], program) == ("$ ", "pentad")
    assert main(arguments) == 0
    printed = capsys.readouterr()
    pattern = re.escape("\n".join(shown)).replace(re.escape("..."), ".*")
    text = "\n".join(line.rstrip() for line in printed.out.splitlines())
    assert re.fullmatch(pattern, text.strip("\n"), re.DOTALL), text


def test_the_file_is_short_and_counted_rightly() -> None:
    lines, steps = len(CODE.splitlines()), len(re.findall(r"^## \d", PAGE, re.MULTILINE))
    assert lines <= MOST_LINES
    assert f"in {steps} steps and {lines} lines" in " ".join(PAGE.split())


def test_the_cost_is_what_was_measured() -> None:
    """The figures of the page stand in the file that the benchmark wrote."""
    file = TESTS / "bench" / "results" / "custom-model.json"
    found = json.loads(file.read_text())["adapter, cpu"]
    one, other = found["modules over builtin"], found["modules over torch alone"]
    text = " ".join(PAGE.split())
    assert f"F {one['F']:.2f}, B {one['B']:.2f} and W {one['W']:.2f} times as long" in text
    assert f"F {other['F']:.2f} and B with W {other['B and W']:.2f}." in text
