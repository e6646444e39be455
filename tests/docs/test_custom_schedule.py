"""The claims of docs/custom-schedule.md about its schedules are true."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pages import blocks
from paths import ROOT

from pentad.orchestrator.cli.cli import main
from pentad.schedules.catalogue import generate
from pentad.schedules.generators.custom import program
from pentad.schedules.simulate.costs import Costs
from pentad.schedules.simulate.dependencies import compute_times
from pentad.schedules.simulate.memory import peak_activations

FILE = ROOT / "docs" / "custom-schedule.md"
PAGE = FILE.read_text()
CODE = "\n\n".join(block.text for block in blocks(FILE, "python"))  # two empty lines before a function
MAX_LINES = 60
STEPS = len(re.findall(r"^## \d", PAGE, re.MULTILINE))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The reader's working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_final_file_is_short_and_its_line_count_is_right() -> None:
    lines = len(CODE.splitlines())
    assert lines <= MAX_LINES
    assert f"in {STEPS} steps and {lines} lines" in " ".join(PAGE.split())


@pytest.mark.parametrize(
    ("function", "extra", "name"), [("late_w", 2, "zb-h1"), ("eager", 0, "zb-h1"), ("eager", 3, "zb-h2")]
)
def test_a_schedule_called_by_a_known_name_is_that_schedule(folder: Path, function: str, extra: int, name: str) -> None:
    (folder / "my.py").write_text(CODE.replace("EAGER = 2", f"EAGER = {extra}"))
    assert program(f"my.py:{function}", 4, 8).hash == generate(name, 4, 8).hash


def test_each_eager_forward_removes_one_idle_unit(folder: Path) -> None:
    for extra in range(4):
        (folder / "my.py").write_text(CODE.replace("EAGER = 2", f"EAGER = {extra}"))
        order = program("my.py:eager", 4, 8)
        spans = [(times[0][0], times[-1][1]) for times in compute_times(order, Costs.uniform(4))]
        assert max(end - start for start, end in spans) == 3 * 8 + 3 - extra
        assert max(peak_activations(order)) == 4 + extra


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 1), (2, 1), (3, 5), (4, 8), (6, 20)])
def test_the_schedule_of_the_page_is_valid_at_any_size(folder: Path, ranks: int, microbatches: int) -> None:
    (folder / "my.py").write_text(CODE)
    for name in ("gpipe", "one_each", "late_w", "eager"):
        sizes = ["--ranks", str(ranks), "--microbatches", str(microbatches)]
        assert main(["schedule", f"my.py:{name}", *sizes, "--json"]) == 0
