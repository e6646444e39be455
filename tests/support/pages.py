"""Code blocks of the documentation pages."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import NamedTuple

from paths import ROOT

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)


class Block(NamedTuple):
    """A fenced block; `kind` is its language, or ''."""

    kind: str
    text: str


def blocks(page: Path, *kinds: str) -> list[Block]:
    """The blocks of a page in order, optionally only those of the given kinds."""
    found = [Block(*each) for each in _BLOCK.findall(page.read_text(encoding="utf-8"))]
    return [block for block in found if not kinds or block.kind in kinds]


def commands(page: Path, kind: str = "sh") -> list[list[str]]:
    """The arguments of each `pentad` command in a page's blocks of one kind, without comments."""
    lines = [line for block in blocks(page, kind) for line in block.text.splitlines()]
    return [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("pentad ")]


def shows(expected: list[str], printed: str) -> bool:
    """Whether a command's output is what a page shows; three dots there stand for omitted text."""
    pattern = re.escape("\n".join(expected)).replace(re.escape("..."), ".*")
    text = "\n".join(line.rstrip() for line in printed.splitlines())
    return re.fullmatch(pattern, text.strip("\n"), re.DOTALL) is not None
