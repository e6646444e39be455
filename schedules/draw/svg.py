"""Timelines as SVG figures: one row per rank, one bar per compute instruction, small on disk."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

from pentad.schedules.draw.palette import (
    BACKGROUNDS,
    OP_STYLES,
    nanoseconds,
    op_style,
    shades,
    stack_overlaps,
    text_colour,
    zero_of,
)
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.simulate.timeline import COMPUTE, Span, Timeline, grouped

MARGIN, LEFT = 16, 74  # pixels: around the figure, and from its edge to time zero
HEADER, HEADING, AXIS = 54, 36, 30  # pixels: heights of title and legend, of a panel's heading, of the time axis
PITCH, SMALLEST_PITCH, ROWS_HEIGHT = 27, 11, 640  # pixels: of a row, at least, of all rows before they shrink
COMPARISON_WIDTH = 900  # pixels
UNITS = ((10**9, " s"), (10**6, " ms"), (10**3, " µs"), (1, " ns"))
NO_UNIT = ((10**9, ""),)
Units = tuple[tuple[int, str], ...]
STYLE = (
    "text{font:12px system-ui,'Segoe UI',Helvetica,Arial,sans-serif}.title{font-size:16px}.title,.bold{font-weight:600}"
    ".middle,.n{text-anchor:middle}.end{text-anchor:end}.n text{font-size:11px;font-weight:600}.grid{fill:none}"
)
THEMES = (  # light and dark
    "text{fill:#1b2029}.soft{fill:#5b6573}.page{fill:#fff}.idle{fill:#eef0f3}.grid{stroke:#d5dae1}",
    "text{fill:#e8ebf0}.soft{fill:#a3adbb}.page{fill:#1a1e25}.idle{fill:#262c35}.grid{stroke:#3d4652}",
)


@dataclass(frozen=True)
class _Scale:
    """What the panels of a figure share: pixels per nanosecond, the length of the time axis, pixels per row."""

    pixels: float
    last: int
    pitch: int
    units: Units

    def duration(self, seconds: float) -> str:
        size, unit = self.unit(round(seconds * 1e9))
        return f"{seconds * 1e9 / size:.4g}{unit}"

    def unit(self, nanos: int) -> tuple[int, str]:
        return next((pair for pair in self.units if nanos >= pair[0]), self.units[-1])


def svg_grid(timeline: Timeline, *, title: str, timed: bool = True) -> str:
    """The SVG text of one step; times are in seconds, or without a unit if not `timed`.

    Idle time is the row's background; a rank's later chunks are fainter. Raises PentadError unless the timeline has
    exactly one step, with compute spans.
    """
    last = _checked("svg_grid", timeline)
    lengths = sorted(span.end - span.start for span in timeline.compute)
    usual = max(lengths[len(lengths) // 4] * 1e9, 1)
    pixels = min(max(22 / usual, 640 / last), 2400 / last)  # room for a forward's number, 640 to 2400 in all
    return _figure({"": timeline}, title, pixels, last, UNITS if timed else NO_UNIT)


def svg_comparison(measured: Timeline, simulated: Timeline, *, title: str) -> str:
    """The SVG text of a measured step above its simulation, on one time axis. Zero is the first compute start of each.

    Raises PentadError unless both timelines have exactly one step, with compute spans.
    """
    last = max(_checked("svg_comparison", timeline) for timeline in (measured, simulated))
    panels = {f"Measured, step {measured.steps[0]}": measured, "Simulated at that step's costs": simulated}
    return _figure(panels, title, (COMPARISON_WIDTH - LEFT - MARGIN) / last, last, UNITS)


def _checked(function: str, timeline: Timeline) -> int:
    """The end of the last span drawn, in nanoseconds."""
    if len(timeline.steps) != 1 or not timeline.compute or not timeline.longest > 0:
        steps = len(timeline.steps)
        raise PentadError(f"{function} got a timeline of {steps} steps: expected one step with compute spans")
    zero = zero_of(timeline)
    return max(nanoseconds(span, zero)[1] for spans in _rows(timeline).values() for span in spans)


def _rows(timeline: Timeline) -> dict[int, list[Span]]:
    """The spans that are drawn, by rank."""
    drawn = (span for span in timeline.spans if span.lane == "compute" or span.op in COMPUTE)
    return grouped(drawn, lambda span: span.rank)


def _figure(panels: dict[str, Timeline], title: str, pixels: float, last: int, units: Units) -> str:
    rows = [spans for timeline in panels.values() for spans in _rows(timeline).values()]
    ops = {span.op for spans in rows for span in spans}
    ranks = max(len(timeline.ranks) for timeline in panels.values())
    pitch = max(min(PITCH, ROWS_HEIGHT // ranks), SMALLEST_PITCH)
    chunks = max(len({span.stage for span in spans} - {-1}) for spans in rows)
    scale = _Scale(pixels, last, pitch, units)
    width, bottom = LEFT + last * pixels + MARGIN, HEADER
    body: list[str] = []
    for heading, timeline in panels.items():
        body += _panel(heading, timeline, bottom, scale)
        bottom += HEADING + len(timeline.ranks) * pitch
    lines = [
        title_line(title),
        *_legend([op for op in OP_STYLES if op in ops]),
        *_axis(HEADER + HEADING - 4, bottom, scale),
        *body,
    ]
    return svg_page(width, bottom + AXIS, title, _colours(ops, chunks), lines)


def svg_page(width: float, height: float, title: str, styles: Sequence[str], lines: Iterable[str]) -> str:
    """The SVG text of a figure of this size in pixels; `styles` (light, dark) are added to THEMES."""
    light, dark = (f"{theme}{style}" for theme, style in zip(THEMES, styles, strict=True))
    size = f"{width:.0f}", f"{height:.0f}"
    document = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{size[0]}" height="{size[1]}" viewBox="0 0 {" ".join(size)}">',
        f"<title>{escaped(title)}</title><style>{STYLE}{light}@media(prefers-color-scheme:dark){{{dark}}}</style>",
        '<rect class="page" width="100%" height="100%" rx="8"/>',
        *lines,
        "</svg>",
    ]
    return "\n".join(document) + "\n"


def title_line(title: str) -> str:
    return f'<text class="title" x="{MARGIN}" y="28">{escaped(title)}</text>'


def escaped(value: str) -> str:
    """Escaped, and without the characters that XML forbids."""
    return escape(re.sub(r"[\x00-\x08\x0b\x0c\x0e-\x1f\ufffe\uffff\ud800-\udfff]", "", value))


def _class(op: str) -> str:
    return op if op in OP_STYLES else "other"


def _colours(ops: set[str], chunks: int) -> list[str]:
    """CSS of the bars and the numbers on them, one per theme: .F is a rank's first chunk, .F.c1 its second."""
    themes = []
    for theme in BACKGROUNDS:
        rules = []
        for name in sorted(set(map(_class, ops))):
            for chunk, fill in enumerate(shades(name, theme, chunks)):
                selector = f".{name}" + f".c{chunk}" * (chunk > 0)
                rules.append(f"{selector}{{fill:{fill}}}.n {selector}{{fill:{text_colour(fill)}}}")
        themes.append("".join(rules))
    return themes


def _legend(ops: list[str]) -> Iterator[str]:
    x = float(MARGIN)
    for label in dict.fromkeys(op_style(op).label for op in ops):
        names = [op for op in ops if op_style(op).label == label]
        for name in names:
            yield f'<rect class="{name}" x="{x:g}" y="41" width="12" height="12" rx="2.5"/>'
            x += 14
        letter = names[0] if len(names[0]) < 3 else ""
        bold = f'<tspan class="bold">{letter}</tspan> ' if letter else ""
        yield f'<text class="soft" x="{x + 4:g}" y="51">{bold}{label}</text>'
        x += 6.9 * len(f"{letter} {label}") + 20


def _axis(top: int, bottom: int, scale: _Scale) -> Iterator[str]:
    """Ticks at 1, 2 or 5 times a power of ten nanoseconds, at least 70 pixels apart."""
    size, unit = scale.unit(scale.last)
    least = 70 / scale.pixels
    power = 10.0 ** math.floor(math.log10(least))
    gap = next(n * power for n in (1, 2, 5, 10) if n * power >= least)
    ticks = [i * gap for i in range(int(scale.last / gap) + 1)]
    path = "".join(f"M{LEFT + tick * scale.pixels:.1f} {top}V{bottom + 2}" for tick in ticks)
    yield f'<path class="grid" d="{path}"/>'
    edge = LEFT + scale.last * scale.pixels + MARGIN
    for tick in ticks:
        label = f"{tick / size:.6g}{unit}"
        x = min(LEFT + tick * scale.pixels, edge - 4 - 3.5 * len(label))
        yield f'<text class="soft middle" x="{x:.1f}" y="{bottom + 17}">{label}</text>'


def _panel(heading: str, timeline: Timeline, top: int, scale: _Scale) -> Iterator[str]:
    """A heading with both bubble figures, then one row per rank."""
    bubble = timeline.bubble()
    pairs = (("makespan", timeline.makespan, bubble.makespan), ("longest", timeline.longest, bubble.longest))
    figures = ", ".join(f"{name} {scale.duration(seconds)} (bubble {share:.1%})" for name, seconds, share in pairs)
    start = f'<tspan class="bold">{heading}</tspan>' + '<tspan dx="14"' if heading else "<tspan"
    yield f'<text x="{MARGIN}" y="{top + HEADING - 12}">{start} class="soft">{figures}</tspan></text>'
    zero, rows = zero_of(timeline), _rows(timeline)
    for index, rank in enumerate(timeline.ranks):
        y = top + HEADING + index * scale.pitch
        yield f'<text class="end" x="{LEFT - 10}" y="{y + scale.pitch / 2 + 2:g}">rank {rank}</text>'
        yield f'<g transform="translate({LEFT} {y})">'
        yield from _row(rows.get(rank, []), zero, scale)
        yield "</g>"


def _row(spans: list[Span], zero: float, scale: _Scale) -> Iterator[str]:
    """Idle background, bars, and the microbatch number on each bar that has room for it."""
    height = scale.pitch - min(5, scale.pitch // 4)
    timed = sorted(((*nanoseconds(span, zero), span) for span in spans), key=lambda item: item[:2])
    stages = sorted({span.stage for span in spans if span.stage >= 0})
    bars, numbers = [], []
    for (start, end, span), (level, depth) in zip(timed, stack_overlaps([t[:2] for t in timed]), strict=True):
        x, width, tall = start * scale.pixels, max((end - start) * scale.pixels, 0.5), height / depth
        chunk = stages.index(span.stage) if span.stage in stages else 0
        name = _class(span.op) + f" c{chunk}" * (chunk > 0)
        y = f' y="{level * tall:.4g}"' if level else ""
        bars.append(f'<rect class="{name}" x="{x:.1f}"{y} width="{max(width - 0.8, 0.5):.1f}" height="{tall:.4g}"/>')
        number = str(span.microbatch) if span.microbatch >= 0 else ""
        if number and tall >= 11 and width >= 6.2 * len(number) + 2:
            middle, base = x + width / 2, (level + 0.5) * tall + 4
            numbers.append(f'<text class="{name}" x="{middle:.1f}" y="{base:.3g}">{number}</text>')
    yield f'<rect class="idle" width="{scale.last * scale.pixels:.1f}" height="{height}"/>'
    yield f'<g class="b">{"".join(bars)}</g><g class="n">{"".join(numbers)}</g>'
