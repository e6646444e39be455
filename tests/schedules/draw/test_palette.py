"""Ops and chunks have colours that even colour-blind readers can tell apart, on light and on dark pages."""

from __future__ import annotations

import math
from itertools import combinations, pairwise

import pytest

from pentad.schedules.draw.palette import BACKGROUNDS, OP_STYLES, SERIES, Theme, shades

# Simulated colour blindness on linear RGB: Machado, Oliveira and Fernandes 2009, severity 1.
EYES = {
    "normal": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": ((0.152, 1.053, -0.205), (0.115, 0.786, 0.099), (-0.004, -0.048, 1.052)),
    "deuteranopia": ((0.367, 0.861, -0.228), (0.280, 0.673, 0.047), (-0.012, 0.043, 0.969)),
    "tritanopia": ((1.256, -0.077, -0.179), (-0.078, 0.931, 0.148), (0.005, 0.691, 0.304)),
}


def lab(colour: str, eye: str) -> tuple[float, float, float]:
    """CIELAB of #rrggbb: a distance of 2.3 is just noticeable."""
    values = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in values]
    red, green, blue = (
        min(max(sum(m * v for m, v in zip(row, linear, strict=True)), 0), 1) for row in EYES[eye]
    )  # fmt: skip
    xyz = (
        (0.4124 * red + 0.3576 * green + 0.1805 * blue) / 0.9505,
        0.2126 * red + 0.7152 * green + 0.0722 * blue,
        (0.0193 * red + 0.1192 * green + 0.9505 * blue) / 1.0888,
    )
    x, y, z = (v ** (1 / 3) if v > 0.008856 else 7.787 * v + 16 / 116 for v in xyz)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def fills(theme: Theme, chunks: int) -> dict[str, list[str]]:
    return {op: shades(op, theme, chunks) for op in ("F", "B", "W", "BW")}


@pytest.mark.parametrize("eye", EYES)
@pytest.mark.parametrize("theme", BACKGROUNDS)
@pytest.mark.parametrize(("chunks", "least"), [(1, 23), (2, 12), (4, 7)])
def test_ops_differ_in_every_chunk(theme: Theme, eye: str, chunks: int, least: float) -> None:
    for one, other in combinations(fills(theme, chunks).values(), 2):
        assert min(math.dist(lab(a, eye), lab(b, eye)) for a in one for b in other) > least


@pytest.mark.parametrize("eye", EYES)
@pytest.mark.parametrize("theme", BACKGROUNDS)
def test_chunks_differ_and_the_first_has_the_colour_of_the_op(theme: Theme, eye: str) -> None:
    for chunks in (1, 2, 3, 4, 6):
        for op, colours in fills(theme, chunks).items():
            assert colours[0] == getattr(OP_STYLES[op], theme) and len(set(colours)) == chunks
            assert all(math.dist(lab(a, eye), lab(b, eye)) > 16 / chunks for a, b in pairwise(colours))


@pytest.mark.parametrize("eye", EYES)
@pytest.mark.parametrize("theme", BACKGROUNDS)
@pytest.mark.parametrize("chunks", [1, 2, 4])
def test_the_mark_of_messages_differs_from_what_it_is_drawn_on(theme: Theme, eye: str, chunks: int) -> None:
    mark = lab(getattr(OP_STYLES["LAYERS"], theme), eye)
    bars = [colour for op in ("F", "B", "BW") for colour in shades(op, theme, chunks)]
    for colour in (*bars, getattr(OP_STYLES["RECOMPUTE"], theme), BACKGROUNDS[theme]):
        assert math.dist(lab(colour, eye), mark) > 23


@pytest.mark.parametrize("theme", BACKGROUNDS)
def test_the_faintest_chunk_stands_out_from_the_background(theme: Theme) -> None:
    for colours in fills(theme, 4).values():
        assert math.dist(lab(colours[-1], "normal"), lab(BACKGROUNDS[theme], "normal")) > 15


@pytest.mark.parametrize("eye", EYES)
@pytest.mark.parametrize(("theme", "number"), [("light", 0), ("dark", 1)])
def test_curves_differ_from_each_other_and_from_the_background(theme: Theme, number: int, eye: str) -> None:
    colours = [lab(colour, eye) for colour in (*(pair[number] for pair in SERIES), BACKGROUNDS[theme])]
    assert all(math.dist(one, other) > 20 for one, other in combinations(colours, 2))
