"""Points on two logarithmic axes as an SVG figure, in the style of the other figures."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from pentad.schedules.draw.losses import MARKERS
from pentad.schedules.draw.palette import SERIES
from pentad.schedules.draw.svg import STYLE, THEMES, escaped

LEFT, TOP, SIZE, MARGIN, LEGEND = 70, 56, 520, 16, 210  # pixels
LINE = 22  # pixels between names
Point = tuple[str, float, float]  # series, x, y


def svg_scatter(points: Sequence[Point], *, title: str, band: float = 0.1) -> str:
    """The SVG text, with a line where both are equal and a band around it."""
    names = list(dict.fromkeys(name for name, _, _ in points))
    low = min(min(x, y) for _, x, y in points) / 1.3
    high = max(max(x, y) for _, x, y in points) * 1.3
    scale = SIZE / math.log(high / low)

    def place(x: float, y: float) -> tuple[float, float]:
        return LEFT + scale * math.log(x / low), TOP + SIZE - scale * math.log(y / low)

    width, height = LEFT + SIZE + LEGEND, TOP + SIZE + 56
    shift = scale * math.log(1 + band)
    corners = f"M{LEFT} {TOP + SIZE}v{-shift:.1f}L{LEFT + SIZE - shift:.1f} {TOP}h{shift:.1f}v{shift:.1f}"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">',
        f"<title>{escaped(title)}</title><style>{_style(len(names))}</style>",
        '<rect class="page" width="100%" height="100%" rx="8"/>',
        f'<text class="title" x="{MARGIN}" y="28">{escaped(title)}</text>',
        f'<path class="idle" d="{corners}L{LEFT + shift:.1f} {TOP + SIZE}z"/>',
        f'<path class="grid" d="M{LEFT} {TOP + SIZE}L{LEFT + SIZE} {TOP}M{LEFT} {TOP}v{SIZE}h{SIZE}"/>',
        *_ticks(low, high, scale),
    ]
    for number, name in enumerate(names):
        own = [place(x, y) for each, x, y in points if each == name]
        marker = MARKERS[(number + number // len(SERIES)) % len(MARKERS)]  # another marker once colours repeat
        marks = "".join(f"M{x:.1f} {y:.1f}{marker}" for x, y in own)
        lines.append(f'<path class="point f{number}" d="{marks}"/>')
        y = TOP + 20 + LINE * number
        lines.append(f'<path class="f{number}" d="M{LEFT + SIZE + 24} {y - 4}{marker}"/>')
        lines.append(f'<text x="{LEFT + SIZE + 38}" y="{y}">{escaped(name)} ({len(own)})</text>')
    return "\n".join([*lines, "</svg>"]) + "\n"


def _style(count: int) -> str:
    themes = []
    for theme, plain in enumerate(THEMES):
        fills = (f".f{number}{{fill:{SERIES[number % len(SERIES)][theme]}}}" for number in range(count))
        themes.append(plain + "".join(fills))
    return f"{STYLE}.point{{opacity:.55}}{themes[0]}@media(prefers-color-scheme:dark){{{themes[1]}}}"


def _ticks(low: float, high: float, scale: float) -> Iterator[str]:
    for power in range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1):
        at = scale * math.log(10.0**power / low)
        text = f"{10.0**power:g} s"
        yield f'<path class="grid" d="M{LEFT + at:.1f} {TOP + SIZE}v5M{LEFT} {TOP + SIZE - at:.1f}h-5"/>'
        yield f'<text class="soft middle" x="{LEFT + at:.1f}" y="{TOP + SIZE + 20}">{text}</text>'
        yield f'<text class="soft end" x="{LEFT - 9}" y="{TOP + SIZE - at + 4:.1f}">{text}</text>'
    yield f'<text class="soft middle" x="{LEFT + SIZE / 2}" y="{TOP + SIZE + 42}">measured</text>'
    yield f'<text class="soft" x="{MARGIN}" y="{TOP - 10}">predicted; the band is 10 %</text>'


def svg_shares(lines: dict[str, list[tuple[int, float]]], *, title: str, label: str) -> str:
    """Shares over a number that grows by factors: a line for each name, dashed if the name ends in a star."""
    numbers = sorted({number for points in lines.values() for number, _ in points})
    low, high = math.log(numbers[0]), math.log(numbers[-1])
    most = 0.1 * math.ceil(10 * max(share for points in lines.values() for _, share in points))
    width, height, bottom = LEFT + SIZE + LEGEND, TOP + SIZE // 2 + 56, TOP + SIZE // 2

    def place(number: int, share: float) -> str:
        x = LEFT + 12 + (SIZE - 24) * (math.log(number) - low) / (high - low)
        return f"{x:.1f} {bottom - SIZE / 2 * share / most:.1f}"

    names = list(dict.fromkeys(name.rstrip("*") for name in lines))
    colours = [f".s{number}{{fill:none;stroke-width:2.2;stroke:{SERIES[number][0]}}}" for number in range(len(names))]
    style = f"{_style(len(names))}{''.join(colours)}.dash{{stroke-dasharray:5 4}}"
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">',
        f"<title>{escaped(title)}</title><style>{style}</style>",
        '<rect class="page" width="100%" height="100%" rx="8"/>',
        f'<text class="title" x="{MARGIN}" y="28">{escaped(title)}</text>',
    ]
    for step in range(round(10 * most) + 1):
        y = bottom - SIZE / 2 * step / 10 / most
        out.append(f'<path class="grid" d="M{LEFT} {y:.1f}h{SIZE}"/>')
        out.append(f'<text class="soft end" x="{LEFT - 9}" y="{y + 4:.1f}">{10 * step} %</text>')
    for number in numbers:
        x = place(number, 0).split()[0]
        out.append(f'<text class="soft middle" x="{x}" y="{bottom + 20}">{number:,}</text>')
    out.append(f'<text class="soft middle" x="{LEFT + SIZE / 2}" y="{bottom + 42}">{escaped(label)}</text>')
    for name, points in lines.items():
        number, is_dashed = names.index(name.rstrip("*")), name.endswith("*")
        path = "L".join(place(*point) for point in points)
        out.append(f'<path class="s{number}{" dash" * is_dashed}" d="M{path}"/>')
    for number, name in enumerate(names):
        y = TOP + 20 + LINE * number
        out.append(f'<path class="s{number}" d="M{LEFT + SIZE + 16} {y - 4}h24"/>')
        out.append(f'<text x="{LEFT + SIZE + 48}" y="{y}">{escaped(name)}</text>')
    return "\n".join([*out, "</svg>"]) + "\n"
