"""What a step's time went into, as a terminal shows it."""

from __future__ import annotations

import pytest
from rich.console import Console

from pentad.orchestrator.api.explanation import Explanation
from pentad.schedules.diagnosis.attribution import PARTS, RankStep


def shown(ranks: int, width: int) -> list[list[str]]:
    """The words of each row of the table of parts."""
    parts = [dict.fromkeys(PARTS, 0) | {"compute": 100_000_000 + rank, "data": 10**9 * rank} for rank in range(ranks)]
    steps = tuple(RankStep(rank, each) for rank, each in enumerate(parts))
    console = Console(width=width)
    with console.capture() as capture:
        console.print(Explanation("runs/x", "1f1b", 1, steps, (), 1.0, layers_measured=True))
    table = capture.get().split("\n\n")[1]
    return [line.split() for line in table.splitlines()]


@pytest.mark.parametrize(("ranks", "width"), [(2, 80), (4, 120), (8, 140)])
def test_every_rank_has_a_column_where_they_fit(ranks: int, width: int) -> None:
    assert shown(ranks, width)[0][-ranks:] == [f"r{rank}" for rank in range(ranks)]


@pytest.mark.parametrize(("ranks", "width"), [(4, 50), (8, 80), (9, 200)])
def test_else_the_rank_that_has_most_of_a_part_is_named(ranks: int, width: int) -> None:
    """Ranks without a column used to be left out without a word."""
    heads, compute, *_ = shown(ranks, width)
    assert heads[-2:] == ["most", "on"] and compute[-2:] == ["rank", str(ranks - 1)]
