"""Which ranks a heat map names, and that it says how many it leaves out."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest

from pentad.schedules.draw.heat_map import MOST_RANKS, RankRow, svg_heat_map


@pytest.mark.parametrize("count", [4, 100, 512])
def test_the_rank_that_differs_most_has_its_name_and_no_two_names_overlap(count: int) -> None:
    rows = [RankRow(f"rank {rank}", [0.01, 0.02], [0.3 if rank == 3 else 0.01]) for rank in range(count)]
    rows[3] = rows[3]._replace(steps=[0.3, 0.3])
    figure = svg_heat_map(rows, [0, 1], ["F"], title="t")
    names = dict(re.findall(r'y="([\d.]+)">(rank \d+)<', figure))
    heights = sorted(map(float, names))
    assert "rank 3" in names.values() and min(b - a for a, b in pairwise(heights)) >= 11
    assert (f"the {MOST_RANKS} of {count} ranks" in figure) == (count > MOST_RANKS)


def test_no_difference_has_one_sign() -> None:
    figure = svg_heat_map([RankRow(f"rank {n}", [0.0], [n / 1000]) for n in (-1, 0, 1)], [0], ["F"], title="t")
    assert figure.count(">+0%<") == 3
