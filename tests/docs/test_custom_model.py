"""The claims of docs/custom-model.md about its model are true."""

from __future__ import annotations

import json
import re

from pages import blocks
from paths import ROOT, TESTS

FILE = ROOT / "docs" / "custom-model.md"
PAGE = FILE.read_text()
CODE = "\n\n".join(block.text for block in blocks(FILE, "python"))
MAX_LINES = 60


def test_the_file_is_short_and_its_line_count_is_right() -> None:
    lines, steps = len(CODE.splitlines()), len(re.findall(r"^## \d", PAGE, re.MULTILINE))
    assert lines <= MAX_LINES
    assert f"in {steps} steps and {lines} lines" in " ".join(PAGE.split())


def test_the_stated_cost_is_the_measured_one() -> None:
    """The figures on the page are those in the benchmark's result file."""
    file = TESTS / "bench" / "results" / "custom-model.json"
    found = json.loads(file.read_text())["adapter, cpu"]
    one, other = found["modules over builtin"], found["modules over torch alone"]
    text = " ".join(PAGE.split())
    assert f"F {one['F']:.2f}, B {one['B']:.2f} and W {one['W']:.2f} times as long" in text
    assert f"F {other['F']:.2f} and B with W {other['B and W']:.2f}." in text
