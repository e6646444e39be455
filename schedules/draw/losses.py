"""Losses by step as an SVG figure: a colour for each corpus, and the mixture in a strip below."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from pentad.schedules.draw.palette import SERIES
from pentad.schedules.draw.svg import escaped, svg_page, title_line
from pentad.schedules.ir.errors import PentadError

LEFT, WIDTH, RIGHT, MARGIN = 52, 700, 80, 16  # pixels: left of axes, axes, label without name, around all
HEADER, HEIGHT, GAP, STRIP, AXIS = 86, 320, 26, 40, 46  # pixels: title and legend, losses, between, mixture, ticks
LETTER = 7.4  # pixels per character of a name
SPREAD = 18  # pixels between the labels of two curves
LINES = (
    ".held,.train{fill:none;stroke-linejoin:round;stroke-linecap:round}.held{stroke-width:2.2}"
    ".train{stroke-width:1.3;opacity:.65}.change{fill:none;stroke-dasharray:3 4}.share{opacity:.8}"
)
PAPER = (  # light and dark
    LINES + ".mark{stroke:#fff}.key,.change{stroke:#5b6573}.dot{fill:#5b6573}",
    ".mark{stroke:#1a1e25}.key,.change{stroke:#a3adbb}.dot{fill:#a3adbb}",
)
MARKERS = (  # circle, square, triangles, diamond: around (0, 0), of about the same area
    "m-4 0a4 4 0 1 0 8 0a4 4 0 1 0-8 0z",
    "m-3.6-3.6h7.2v7.2h-7.2z",
    "m0-5l4.8 8.4h-9.6z",
    "m0-5.2l5.2 5.2l-5.2 5.2l-5.2-5.2z",
    "m0 5l4.8-8.4h-9.6z",
)


class Window(NamedTuple):
    """Steps `first` to `end` - 1 of training: mean loss per target token, in nats, and the number of those tokens."""

    first: int
    end: int
    loss: float | None
    tokens: int

    @property
    def middle(self) -> float:
        return (self.first + self.end - 1) / 2


class Evaluation(NamedTuple):
    """Loss per target token, in nats, of the weights after `step` steps."""

    step: int
    loss: float


@dataclass(frozen=True)
class LossCurve:
    """The losses of a corpus. Curves of one figure have the same windows, or none."""

    name: str
    training: tuple[Window, ...] = ()
    held_out: tuple[Evaluation, ...] = ()

    @property
    def losses(self) -> list[float]:
        """All losses: of training, then of held-out data."""
        return [loss for run in self.runs for _, loss in run] + [loss for _, loss in self.held_out]

    @property
    def runs(self) -> list[list[tuple[float, float]]]:
        """(step, loss) of the windows, cut where one has no loss."""
        parts = groupby(self.training, lambda window: window.loss is None)
        return [[(w.middle, w.loss) for w in windows if w.loss is not None] for empty, windows in parts if not empty]

    @property
    def last(self) -> list[float]:
        """The loss at the curve's right end, preferably of held-out data; [] if there is none."""
        return self.losses[-1:]


@dataclass(frozen=True)
class _Axes:
    """Steps from 0 to `steps` and losses from `low` to `high`, both multiples of `gap`, in pixels."""

    steps: int
    low: float
    high: float
    gap: float

    def x(self, step: float) -> float:
        return LEFT + WIDTH * step / self.steps

    def y(self, loss: float) -> float:
        return HEADER + HEIGHT * (self.high - loss) / (self.high - self.low)

    def line(self, points: Sequence[tuple[float, float]]) -> str:
        return "M" + "L".join(f"{self.x(step):.1f} {self.y(loss):.1f}" for step, loss in points)


def svg_losses(curves: Sequence[LossCurve], *, title: str, changes: Sequence[int] = (), of_one_run: bool = True) -> str:
    """The SVG text. Dashed lines mark `changes`, the steps at which the mixture changes.

    If one run trains on several corpora, a strip shows each one's share of the target tokens. Raises PentadError if
    there is no loss.
    """
    axes = _axes(curves)
    mixed = of_one_run and sum(bool(curve.training) for curve in curves) > 1
    bottom = HEADER + HEIGHT + (GAP + STRIP if mixed else 0)
    width, height = LEFT + WIDTH + RIGHT + round(LETTER * max(len(curve.name) for curve in curves)), bottom + AXIS
    lines = [
        title_line(title),
        *_legend(curves),
        *_grid(axes, bottom),
        *(_strip(curves, axes, bottom - STRIP) if mixed else ()),
        *_changes(changes, axes, bottom),
        *_lines(curves, axes),
        *_labels(curves, axes),
    ]
    return svg_page(width, height, title, _styles(len(curves)), lines)


def _axes(curves: Sequence[LossCurve]) -> _Axes:
    losses = [loss for curve in curves for loss in curve.losses]
    if not losses:
        raise PentadError(f"svg_losses got {len(curves)} curves without a loss: expected at least one loss")
    ends = [window.end for curve in curves for window in curve.training]
    steps = max(1, *ends, *(each.step for curve in curves for each in curve.held_out))
    gap = _gap(max(losses) - min(losses) or 1.0, 6)
    low, high = math.floor(min(losses) / gap), math.ceil(max(losses) / gap)
    return _Axes(steps, low * gap, max(high, low + 1) * gap, gap)


def _gap(length: float, most: int) -> float:
    """1, 2 or 5 times a power of ten that fits into `length` at most `most` times."""
    power = 10.0 ** math.floor(math.log10(length / most))
    return next(n * power for n in (1, 2, 5, 10) if n * power * most >= length * (1 - 1e-9))


def _styles(count: int) -> list[str]:
    themes = []
    for theme, paper in enumerate(PAPER):
        rules = [paper]
        for number in range(count):
            colour = SERIES[number % len(SERIES)][theme]
            rules.append(f".s{number}{{stroke:{colour}}}.f{number}{{fill:{colour}}}")
        themes.append("".join(rules))
    return themes


def _marker(number: int, x: float, y: float) -> str:
    return f'<path class="mark f{number}" d="M{x:.1f} {y:.1f}{MARKERS[number % len(MARKERS)]}"/>'


def _legend(curves: Sequence[LossCurve]) -> Iterator[str]:
    """The meaning of thick and thin lines."""
    lengths = {window.end - window.first for curve in curves for window in curve.training}
    x, y = MARGIN, 50
    if any(curve.held_out for curve in curves):
        yield f'<path class="held key" d="M{x} {y - 4}h28"/><circle class="dot" cx="{x + 14}" cy="{y - 4}" r="4"/>'
        yield f'<text class="soft" x="{x + 36}" y="{y}">held-out data</text>'
        x += 136
    if lengths:
        text = f"training, mean of {max(lengths)} steps" if max(lengths) > 1 else "training"
        yield f'<path class="train key" d="M{x} {y - 4}h28"/><text class="soft" x="{x + 36}" y="{y}">{text}</text>'
    yield f'<text class="soft" x="{MARGIN}" y="{HEADER - 12}">loss, nats per token</text>'


def _grid(axes: _Axes, bottom: int) -> Iterator[str]:
    """Grid lines and numbers of the losses and, at the bottom, ticks and numbers of the steps."""
    right = axes.x(axes.steps)
    count = round((axes.high - axes.low) / axes.gap)
    losses = [axes.low + number * axes.gap for number in range(count + 1)]
    yield f'<path class="grid" d="{"".join(f"M{LEFT} {axes.y(loss):.1f}H{right:.1f}" for loss in losses)}"/>'
    for loss in losses:
        yield f'<text class="soft end" x="{LEFT - 8}" y="{axes.y(loss) + 4:.1f}">{round(loss, 9):g}</text>'
    gap = max(1, round(_gap(axes.steps, 8)))
    for step in range(0, axes.steps + 1, gap):
        yield f'<path class="grid" d="M{axes.x(step):.1f} {bottom}v5"/>'
        yield f'<text class="soft middle" x="{axes.x(step):.1f}" y="{bottom + 19}">{step:,}</text>'
    yield f'<text class="soft middle" x="{(LEFT + right) / 2:.1f}" y="{bottom + 37}">optimizer steps</text>'


def _strip(curves: Sequence[LossCurve], axes: _Axes, top: int) -> Iterator[str]:
    """Shares of the target tokens, stacked in the order of the curves."""
    yield f'<text class="soft" x="{LEFT}" y="{top - 7}">share of the training tokens</text>'
    trained = [(number, curve.training) for number, curve in enumerate(curves) if curve.training]
    totals = [max(1, sum(w.tokens for w in windows)) for windows in zip(*(its for _, its in trained), strict=True)]
    above = [float(top)] * len(totals)
    for number, windows in trained:
        below = [y + STRIP * w.tokens / total for y, w, total in zip(above, windows, totals, strict=True)]
        edges = [(axes.x(w.first), axes.x(w.end), y, under) for w, y, under in zip(windows, above, below, strict=True)]
        upper = "".join(f"V{y:.1f}H{end:.1f}" for _, end, y, _ in edges)
        lower = "".join(f"V{under:.1f}H{first:.1f}" for first, _, _, under in reversed(edges))
        yield f'<path class="share f{number}" d="M{edges[0][0]:.1f} {top}{upper}{lower}z"/>'
        above = below


def _changes(steps: Sequence[int], axes: _Axes, bottom: int) -> Iterator[str]:
    for step in steps:
        yield f'<path class="change" d="M{axes.x(step):.1f} {HEADER}V{bottom}"/>'
    if steps:
        yield f'<text class="soft" x="{axes.x(steps[0]) + 6:.1f}" y="{HEADER + 15}">the mixture changes</text>'


def _lines(curves: Sequence[LossCurve], axes: _Axes) -> Iterator[str]:
    """Training at the back, then held-out data, then its markers."""
    for number, curve in enumerate(curves):
        if curve.runs:
            yield f'<path class="train s{number}" d="{"".join(map(axes.line, curve.runs))}"/>'
    for number, curve in enumerate(curves):
        if curve.held_out:
            yield f'<path class="held s{number}" d="{axes.line(curve.held_out)}"/>'
    for number, curve in enumerate(curves):
        yield from (_marker(number, axes.x(step), axes.y(loss)) for step, loss in curve.held_out)


def _labels(curves: Sequence[LossCurve], axes: _Axes) -> Iterator[str]:
    """Name and last loss of each curve beside its right end, spread so that they do not overlap."""
    ends = sorted((axes.y(loss), number) for number, curve in enumerate(curves) for loss in curve.last)
    places: list[float] = []
    for y, _ in ends:
        places.append(max(y, places[-1] + SPREAD) if places else y)
    for index, y in enumerate(places):  # labels pushed out at the bottom move up again
        places[index] = min(y, HEADER + HEIGHT - SPREAD * (len(places) - 1 - index))
    for y, (_, number) in zip(places, ends, strict=True):
        (loss,), x = curves[number].last, axes.x(axes.steps) + 22
        name = f'<tspan class="bold">{escaped(curves[number].name)}</tspan>'
        yield f'{_marker(number, x, y)}<text x="{x + 10:.1f}" y="{y + 4:.1f}">{name} {loss:.2f}</text>'
