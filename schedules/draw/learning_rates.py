"""Learning rates as an SVG figure, one panel per schedule."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape

from pentad.schedules.draw.svg import svg_page
from pentad.schedules.spec.learning_rate import LearningRate

COLUMNS, MARGIN = 4, 16
WIDTH, HEIGHT, GAP, HEADING = 190, 90, 24, 24  # pixels: of a panel, between panels, above a panel
LINES = ".curve{fill:none;stroke:#1f3fa8;stroke-width:2}", ".curve{stroke:#7f9bf5}"


def svg_learning_rates(panels: Mapping[str, LearningRate]) -> str:
    """The SVG text of learning rates by title: each panel goes from 0 to the peak, over `decay_steps` and a tenth
    more."""
    rows = -(-len(panels) // COLUMNS)
    width = 2 * MARGIN + COLUMNS * (WIDTH + GAP) - GAP
    height = 2 * MARGIN + rows * (HEADING + HEIGHT + GAP) - GAP
    lines = list[str]()
    for number, (title, rate) in enumerate(panels.items()):
        row, column = divmod(number, COLUMNS)
        lines += _panel(title, rate, MARGIN + column * (WIDTH + GAP), MARGIN + row * (HEADING + HEIGHT + GAP) + HEADING)
    return svg_page(width, height, "Learning rates by step", LINES, lines)


def _panel(title: str, rate: LearningRate, left: int, top: int) -> Iterator[str]:
    last = rate.decay_steps * 11 // 10
    points = " ".join(
        f"{left + WIDTH * step / last:.1f},{top + HEIGHT * (1 - rate.at(step) / rate.peak):.1f}"
        for step in range(last + 1)
    )
    end = left + WIDTH * rate.decay_steps / last
    yield f'<text class="bold" x="{left}" y="{top - 8}">{escape(title)}</text>'
    yield f'<rect class="idle" x="{left}" y="{top}" width="{WIDTH}" height="{HEIGHT}"/>'
    yield f'<path class="grid" d="M{end:.1f} {top}V{top + HEIGHT}"/>'
    yield f'<polyline class="curve" points="{points}"/>'
