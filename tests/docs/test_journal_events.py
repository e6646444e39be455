"""The observability page lists every event that a journal can have, and no other."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from paths import ROOT

NAMED_ELSEWHERE = {"slow rank", "slow rank over", "rebalanced", "replanned"}  # not in calls of `record`


def recorded() -> Iterator[str]:
    """The first arguments of all calls of `record`, if they are string literals or a choice of two."""
    for path in (ROOT / "orchestrator").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            match node:
                case ast.Call(func=ast.Attribute(attr="record") | ast.Name(id="record"), args=[first, *_]):
                    texts = [first.body, first.orelse] if isinstance(first, ast.IfExp) else [first]
                    yield from (str(each.value) for each in texts if isinstance(each, ast.Constant))


def test_every_event_of_the_journal_is_on_the_page() -> None:
    page = (ROOT / "docs" / "observability.md").read_text("utf-8")
    table = page.partition("### Events of the journal")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`[^|]*) \|", table, re.MULTILINE)
    assert {name for row in rows for name in re.findall(r"`([^`]+)`", row)} == {*recorded()} | NAMED_ELSEWHERE
