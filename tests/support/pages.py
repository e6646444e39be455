"""The blocks of the documentation's pages."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import NamedTuple

from paths import ROOT

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)


class Block(NamedTuple):
    """A fenced block: `kind` is its language ('' where there is none)."""

    kind: str
    text: str


def blocks(page: Path, *kinds: str) -> list[Block]:
    """The blocks of a page, in order; those of some kinds only, if any are named."""
    found = [Block(*each) for each in _BLOCK.findall(page.read_text(encoding="utf-8"))]
    return [block for block in found if not kinds or block.kind in kinds]


def commands(page: Path, kind: str = "sh") -> list[list[str]]:
    """The arguments of each `pentad` command in a page's blocks of a kind, without comments."""
    lines = [line for block in blocks(page, kind) for line in block.text.splitlines()]
    return [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("pentad ")]


def shows(expected: list[str], printed: str) -> bool:
    """Whether a command's output is what a page shows, where three dots stand for what is left out."""
    pattern = re.escape("\n".join(expected)).replace(re.escape("..."), ".*")
    text = "\n".join(line.rstrip() for line in printed.splitlines())
    return re.fullmatch(pattern, text.strip("\n"), re.DOTALL) is not None
