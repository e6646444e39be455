"""Pages of docs that hold Python: each block runs, and prints what stands in the block of text behind it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from paths import ROOT

DOCS = ROOT / "docs"
BLOCK = re.compile(r"^```(python|text)\n(.*?)^```", re.DOTALL | re.MULTILINE)
MARK = "-- end of block --"


@pytest.mark.parametrize("page", ["programs.md", "auto.md"])
def test_every_block_prints_what_the_page_shows(page: str, tmp_path: Path) -> None:
    blocks = BLOCK.findall((DOCS / page).read_text())
    code = [block for kind, block in blocks if kind == "python"]
    shown = [follows[1] if follows[0] == "text" else None for _, follows in _with_next(blocks)]
    (tmp_path / "page.py").write_text(f"\nprint({MARK!r})\n".join(code))
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        [sys.executable, "page.py"], cwd=tmp_path, env={**os.environ, "PATH": path}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    printed = done.stdout.split(f"{MARK}\n")
    assert len(printed) == len(shown) > 3
    for expected, found in zip(shown, printed, strict=True):
        assert expected is None or found == expected


def _with_next(blocks: list[tuple[str, str]]) -> list[tuple[str, tuple[str, str]]]:
    """The blocks of Python, each with the block behind it."""
    after = [*blocks[1:], ("", "")]
    return [(block, follows) for (kind, block), follows in zip(blocks, after, strict=True) if kind == "python"]


COMMANDS = [
    line.partition("#")[0].strip()
    for block in re.findall(r"^```sh\n(.*?)^```", (DOCS / "axes.md").read_text(), re.DOTALL | re.MULTILINE)
    for line in block.splitlines()
]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_mesh_of_the_page_can_be_planned(command: str) -> None:
    """The configurations lie where the page's reader stands."""
    name, *words = command.split()
    program = Path(sys.executable).parent / name
    done = subprocess.run([program, *words], cwd=DOCS.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "ranks" in done.stdout
