"""Heat maps of rank x step and rank x op: how much longer each rank takes than its peers, as an SVG figure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from pentad.schedules.draw.palette import mixed
from pentad.schedules.draw.svg import LEFT, MARGIN, escaped, svg_page, title_line
from pentad.schedules.ir.errors import PentadError

HEADER, HEADING, BELOW, GAP = 54, 30, 24, 28  # pixels
WIDTH, COLUMN, PITCH, SMALLEST_PITCH, HEIGHT = 640, 64, 18, 3, 560
MOST_RANKS = 256
FULL = 0.2  # the difference drawn in full colour
BINS = 5  # for each sign
FASTER, SLOWER = ("#2166ac", "#74a9f0"), ("#c2410c", "#ff8a3d")  # on light and dark; differ in lightness as well
IDLE = ("#eef0f3", "#262c35")


class RankRow(NamedTuple):
    """A rank's name, and its relative differences from its peers by step and by op, None where unknown."""

    name: str
    steps: list[float | None]
    ops: list[float | None]


def svg_heat_map(rows: Sequence[RankRow], steps: Sequence[int], ops: Sequence[str], *, title: str) -> str:
    """The SVG text. With more than MOST_RANKS rows, it shows those that were slowest in any step, and says so. Where
    rows are too low for a name each, those that differ most are named.

    Raises PentadError without rows or steps."""
    if not rows or not steps:
        raise PentadError("svg_heat_map got no times: expected those of at least one rank and step")
    shown_of = (
        f"; the {MOST_RANKS} of {len(rows)} ranks that were slowest in any step" if len(rows) > MOST_RANKS else ""
    )
    if shown_of:
        slowest = sorted(rows, key=lambda row: -max((each for each in row.steps if each is not None), default=0.0))
        shown = {row.name for row in slowest[:MOST_RANKS]}
        rows = [row for row in rows if row.name in shown]
    pitch = max(SMALLEST_PITCH, min(PITCH, HEIGHT // len(rows)))
    left = max(LEFT, 7 * max(len(row.name) for row in rows) + 24)
    right = left + WIDTH + GAP
    width, bottom = right + COLUMN * len(ops) + MARGIN, HEADER + HEADING + pitch * len(rows)
    lines = [
        title_line(title),
        *_legend(shown_of),
        f'<text class="bold" x="{left}" y="{HEADER + 20}">by step</text>',
        *_op_heads(ops, right),
    ]
    cell = WIDTH / len(steps)
    named = _named(rows, -(-11 // pitch))
    for index, row in enumerate(rows):
        y = HEADER + HEADING + index * pitch
        if index in named:
            lines.append(f'<text class="end" x="{left - 10}" y="{y + pitch / 2 + 4:g}">{escaped(row.name)}</text>')
        lines += _cells(row.steps, left, y, cell, pitch)
        lines += _cells(row.ops, right, y, COLUMN, pitch)
        lines += _numbers(row.ops, right, y, pitch)
    lines += _step_axis(steps, left, bottom, cell)
    return svg_page(width, bottom + BELOW + MARGIN, title, _colours(), lines)


def _named(rows: Sequence[RankRow], apart: int) -> set[int]:
    """The rows with a name, at least `apart` from each other: first those that differ most from their peers."""

    def difference(index: int) -> float:
        return max((abs(each) for each in rows[index].ops if each is not None), default=0.0)

    found = set[int]()
    for index in sorted(range(len(rows)), key=difference, reverse=True):
        if found.isdisjoint(range(index - apart + 1, index + apart)):
            found.add(index)
    return found


def _bin(value: float | None) -> int | None:
    return None if value is None else max(-BINS, min(BINS, round(value / FULL * BINS)))


def _cells(values: Sequence[float | None], x: float, y: float, cell: float, pitch: int) -> Iterator[str]:
    """One rectangle per run of neighbours of the same colour."""
    at, height = 0, pitch - (1 if pitch > 4 else 0)
    for colour, group in groupby(map(_bin, values)):
        count = len(list(group))
        name = "idle" if not colour else f"{'s' if colour > 0 else 'f'}{abs(colour)}"
        if colour is not None:
            place = f'x="{x + at * cell:.1f}" y="{y}" width="{count * cell:.2f}" height="{height}"'
            yield f'<rect class="{name}" {place}/>'
        at += count


def _numbers(values: Sequence[float | None], x: float, y: float, pitch: int) -> Iterator[str]:
    for index, value in enumerate(values):
        if value is not None and pitch >= 13:
            strong = " strong" if abs(_bin(value) or 0) > 2 else ""
            middle = x + (index + 0.5) * COLUMN
            yield f'<text class="middle{strong}" x="{middle:g}" y="{y + pitch / 2 + 4:g}">{value:+z.0%}</text>'


def _legend(shown_of: str) -> Iterator[str]:
    x, share = float(MARGIN), f"{100 * FULL:g} %"
    yield f'<text class="soft" x="{x}" y="50">{share} faster</text>'
    x += 80
    for number in range(-BINS, BINS + 1):
        name = "idle" if not number else f"{'s' if number > 0 else 'f'}{abs(number)}"
        yield f'<rect class="{name}" x="{x:g}" y="40" width="14" height="12"/>'
        x += 14
    yield f'<text class="soft" x="{x + 8:g}" y="50">{share} slower than ranks with the same stages{shown_of}</text>'


def _op_heads(ops: Sequence[str], x: float) -> Iterator[str]:
    for index, op in enumerate(ops):
        name = op if len(op) <= 9 else f"{op[:8]}…"
        yield f'<text class="middle bold" x="{x + (index + 0.5) * COLUMN:g}" y="{HEADER + 20}">{escaped(name)}</text>'


def _step_axis(steps: Sequence[int], x: float, y: float, cell: float) -> Iterator[str]:
    count = max(1, len(steps) // 8)
    for index in range(0, len(steps), count):
        if index + count // 2 < len(steps) or index == 0:
            yield f'<text class="soft middle" x="{x + (index + 0.5) * cell:.1f}" y="{y + 17}">{steps[index]}</text>'


def _colours() -> list[str]:
    themes = []
    for theme, idle in enumerate(IDLE):
        rules = []
        for name, fills in (("f", FASTER), ("s", SLOWER)):
            for number in range(1, BINS + 1):
                rules.append(f".{name}{number}{{fill:{mixed(idle, fills[theme], number / BINS)}}}")
        rules.append(f".strong{{fill:{('#ffffff', '#16191f')[theme]}}}")
        themes.append("".join(rules))
    return themes
