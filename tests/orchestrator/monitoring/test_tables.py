"""Tables fit into a terminal without cutting a value or breaking a word."""

from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from pentad.orchestrator.monitoring.tables import fitted_table

pytestmark = pytest.mark.timeout(60)
HEADS = ("saves>", "share>", "cause", "what would remove it")
WORD = st.text("abcdefghij.=_", min_size=1, max_size=14)
TEXT = st.lists(WORD, min_size=1, max_size=8).map(" ".join)
ROWS = st.lists(st.tuples(st.just("907.5 ms"), st.just("67.4 %"), TEXT, TEXT), min_size=1, max_size=4)


@given(rows=ROWS, width=st.integers(50, 120))
def test_every_word_of_wrapped_columns_and_every_value_is_shown_whole(rows: list[tuple[str, ...]], width: int) -> None:
    out = io.StringIO()
    Console(file=out, width=width).print(fitted_table(HEADS, rows, width, drop=("share",), wrapped=HEADS[2:]))
    lines, shown = out.getvalue().splitlines(), out.getvalue().split()
    assert max(map(len, lines)) <= width and "…" not in out.getvalue()
    words = [word for row in rows for cell in (row[0], *row[2:]) for word in cell.split()]
    assert all(shown.count(word) >= words.count(word) for word in words)
