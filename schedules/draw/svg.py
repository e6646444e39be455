"""A schedule's grid as a figure: a row a rank, a bar a compute instruction, made for papers and small on disk."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from html import escape

from pentad.schedules.draw.palette import GROUNDS, LOOKS, ink, look, nanoseconds, shades, stack
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.simulate.timeline import COMPUTE, Span, Timeline

LEFT, TOP, BAR, PITCH, MARGIN = 56, 44, 22, 27, 12  # pixels: first bar's corner, height of a bar and of a row
UNITS = ((10**9, " s"), (10**6, " ms"), (10**3, " µs"), (1, " ns"))
NO_UNIT = ((10**9, ""),)
Units = tuple[tuple[int, str], ...]
STYLE = (
    "text{font:11px Helvetica,Arial,sans-serif;fill:#1b2029}.t{font-size:14px;font-weight:bold}"
    ".n text{text-anchor:middle;font-weight:bold;fill:#fff}.n .d{fill:#16191f}.a text{text-anchor:middle;fill:#667085}"
    ".r{text-anchor:end}.i{fill:#eef0f3}.g{stroke:#d5dae1;fill:none}"
)


def svg_grid(timeline: Timeline, *, title: str, timed: bool = True) -> str:
    """The SVG text of one step, with times in seconds, or (not `timed`) in no unit. Idle time is the row's grey ground;
    a rank's second stage is drawn paler than the first, and so on.

    Drawn are the spans of the compute lane. Raises PentadError if the timeline has not exactly one step, or no compute.
    """
    if len(timeline.steps) != 1 or not timeline.compute or not timeline.longest > 0:
        raise PentadError(
            f"svg_grid got a timeline of {len(timeline.steps)} steps: expected one step with compute spans"
        )
    zero = min(span.start for span in timeline.compute)
    drawn = [span for span in timeline.spans if span.lane == "compute" or span.op in COMPUTE]
    last = max(nanoseconds(span, zero)[1] for span in drawn)
    scale = _scale(timeline, last)
    width, height = LEFT + last * scale + MARGIN, TOP + len(timeline.ranks) * PITCH + 26
    box = f'viewBox="0 0 {width:.0f} {height}"'
    ops = [op for op in LOOKS if any(span.op == op for span in drawn)]
    rows = [[s for s in drawn if s.rank == rank] for rank in timeline.ranks]
    units = UNITS if timed else NO_UNIT
    chunks = max(len({span.stage for span in row} - {-1}) for row in rows)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height}" {box}>',
        f"<title>{_text(title)}</title><style>{STYLE}{_colours(drawn, chunks)}</style>",
        f'<rect width="100%" height="100%" fill="#fff"/><text class="t" x="{MARGIN}" y="18">{_text(title)}</text>',
        f'<text x="{MARGIN}" y="34">{_figures(timeline, units)}</text>',
        *_legend(ops, width),
        *_axis(last, scale, len(rows), units),
        *(line for i, row in enumerate(rows) for line in _row(row, i, timeline.ranks[i], zero, scale, last, chunks)),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _text(value: str) -> str:
    """Escaped, and without the control characters that no XML file may hold."""
    return escape(re.sub(r"[\x00-\x08\x0b\x0c\x0e-\x1f\ufffe\uffff\ud800-\udfff]", "", value))


def _scale(timeline: Timeline, last: int) -> float:
    """Pixels a nanosecond: a usual forward holds its number, within 640 to 2400 pixels for the whole."""
    lengths = sorted(span.end - span.start for span in timeline.compute)
    usual = max(lengths[len(lengths) // 4] * 1e9, 1)
    return min(max(22 / usual, 640 / last), 2400 / last)


def _class(op: str) -> str:
    return op if op in LOOKS else "other"


def _colours(spans: list[Span], chunks: int) -> str:
    """A class an op, and behind it one a chunk (c1, c2, ...) that is paler."""
    found = []
    for name in sorted({_class(span.op) for span in spans}):
        first, *paler = shades(look(name).light, GROUNDS[0], chunks)
        found.append(f".{name}{{fill:{first}}}")
        found += [f".{name}.c{chunk}{{fill:{fill}}}" for chunk, fill in enumerate(paler, 1)]
    return "".join(found)


def _figures(timeline: Timeline, units: Units) -> str:
    bubble = timeline.bubble()
    pairs = (("makespan", timeline.makespan, bubble.makespan), ("longest", timeline.longest, bubble.longest))
    return ", ".join(f"{name} {_duration(value, units)} (bubble {share:.1%})" for name, value, share in pairs)


def _duration(seconds: float, units: Units) -> str:
    size, unit = _unit(round(seconds * 1e9), units)
    return f"{seconds * 1e9 / size:.4g}{unit}"


def _unit(nanos: int, units: Units) -> tuple[int, str]:
    return next((pair for pair in units if nanos >= pair[0]), units[-1])


def _legend(ops: list[str], width: float) -> Iterator[str]:
    x = width - MARGIN
    for op in reversed(ops):
        x -= 7 * len(op) + 26
        yield f'<rect class="{op}" x="{x:.0f}" y="25" width="11" height="11" rx="2"/>'
        yield f'<text x="{x + 15:.0f}" y="34">{op}</text>'


def _axis(last: int, scale: float, rows: int, units: Units) -> Iterator[str]:
    """Ticks at 1, 2 or 5 times a power of ten nanoseconds, at least 70 pixels apart."""
    size, unit = _unit(last, units)
    least = 70 / scale
    power = 10.0 ** math.floor(math.log10(least))
    gap = next(n * power for n in (1, 2, 5, 10) if n * power >= least)
    ticks = [i * gap for i in range(int(last / gap) + 1)]
    bottom = TOP + rows * PITCH
    path = "".join(f"M{LEFT + tick * scale:.1f} {TOP - 3}V{bottom}" for tick in ticks)
    labels = (f'<text x="{LEFT + t * scale:.1f}" y="{bottom + 14}">{t / size:.6g}{unit}</text>' for t in ticks)
    yield f'<path class="g" d="{path}"/><g class="a">{"".join(labels)}</g>'


def _row(spans: list[Span], index: int, rank: int, zero: float, scale: float, last: int, chunks: int) -> Iterator[str]:
    timed = sorted(((*nanoseconds(span, zero), span) for span in spans), key=lambda item: item[:2])
    stages = sorted({span.stage for span in spans if span.stage >= 0})
    bars, numbers = [], []
    for (start, end, span), (level, depth) in zip(timed, stack([item[:2] for item in timed]), strict=True):
        x, width, tall = start * scale, max((end - start) * scale, 0.5), BAR / depth
        chunk = stages.index(span.stage) if span.stage in stages else 0
        shade = _class(span.op) + f" c{chunk}" * (chunk > 0)
        at = f' y="{level * tall:.4g}"' if level else ""
        bars.append(f'<rect class="{shade}" x="{x:.1f}"{at} width="{max(width - 0.8, 0.5):.1f}" height="{tall:.4g}"/>')
        label = str(span.microbatch) if span.microbatch >= 0 else ""
        if label and tall >= 11 and width >= 6.2 * len(label) + 2:
            fill = shades(look(span.op).light, GROUNDS[0], chunks)[chunk]
            tone = ' class="d"' if ink(fill) != "#ffffff" else ""
            numbers.append(f'<text{tone} x="{x + width / 2:.1f}" y="{(level + 0.5) * tall + 4:.3g}">{label}</text>')
    y = TOP + index * PITCH
    yield f'<text class="r" x="{LEFT - 8}" y="{y + 15}">rank {rank}</text><g transform="translate({LEFT} {y})">'
    yield f'<rect class="i" width="{last * scale:.1f}" height="{BAR}"/><g class="b">{"".join(bars)}</g>'
    yield f'<g class="n">{"".join(numbers)}</g></g>'
