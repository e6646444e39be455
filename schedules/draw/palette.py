"""What all drawings share: colours of ops and chunks, the order of rows, and times in nanoseconds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from pentad.schedules.simulate.timeline import COMPUTE, Span, Timeline


class OpStyle(NamedTuple):
    """How an op is drawn: legend text, fills on a light and a dark background, and the nearest colour name of trace
    viewers."""

    label: str
    light: str
    dark: str
    cname: str


Theme = Literal["light", "dark"]
BACKGROUNDS: dict[Theme, str] = {"light": "#ffffff", "dark": "#1a1e25"}
FAINTEST = 0.52  # share of the background in the colour of a rank's last chunk
# F, B, W and BW differ in lightness as well as in hue, in every shade, for readers who are colour-blind.
OP_STYLES = {
    "F": OpStyle("forward", "#1f3fa8", "#7f9bf5", "rail_response"),
    "B": OpStyle("backward, input", "#d9a02b", "#f7cf7c", "rail_idle"),
    "W": OpStyle("backward, weights", "#3fa873", "#6fdcc4", "rail_load"),
    "BW": OpStyle("backward, both", "#7a2433", "#dd3b2a", "rail_animation"),
    "RECOMPUTE": OpStyle("recompute", "#a9c6ee", "#3d628f", "generic_work"),
    "LAYERS": OpStyle("exposed messages inside layers", "#961eff", "#dcd6ff", "generic_work"),  # a mark within bars
    "SEND_F": OpStyle("activations", "#8ba6cc", "#6f8bb3", "generic_work"),
    "RECV_F": OpStyle("activations", "#bccbe2", "#4a5d7b", "generic_work"),
    "SEND_B": OpStyle("gradients", "#cfae7d", "#a98d63", "generic_work"),
    "RECV_B": OpStyle("gradients", "#e4d3b6", "#6f604a", "generic_work"),
    "ALL_GATHER": OpStyle("gather", "#a79ac6", "#8a7db0", "generic_work"),
    "FREE": OpStyle("gather", "#d3cde2", "#575070", "generic_work"),
    "REDUCE_SCATTER": OpStyle("reduce", "#bb8fa9", "#a0738f", "generic_work"),
    "ALL_REDUCE": OpStyle("reduce", "#bb8fa9", "#a0738f", "generic_work"),
    "NORM": OpStyle("norm, step", "#9aa2ae", "#7c8593", "grey"),
    "STEP": OpStyle("norm, step", "#6c7583", "#a3acb9", "grey"),
    "VALIDATE": OpStyle("validation", "#b3b9a6", "#7f8671", "grey"),
    "ROLLBACK": OpStyle("validation", "#8f977d", "#a0a78f", "grey"),
    "LOSS": OpStyle("loss", "#9aa2ae", "#7c8593", "grey"),
    "OFFLOAD": OpStyle("copy", "#a8b5b0", "#6d7d77", "grey"),
    "RELOAD": OpStyle("copy", "#cfd8d4", "#4c5a55", "grey"),
}
SERIES = (  # curves, on a light and a dark background; like ops, they differ in lightness as well as in hue
    ("#1f3fa8", "#6f8ff7"),
    ("#d97706", "#fbbf5a"),
    ("#0f9b78", "#4fd1a5"),
    ("#8a1c3c", "#e8506a"),
    ("#b65fc4", "#a9d4ff"),
)
OTHER = OpStyle("other", "#b6bcc6", "#6b7380", "generic_work")
ROWS = ("compute", "layers", "receive", "send", "p2p", "gather", "reduce", "copy")


def op_style(op: str) -> OpStyle:
    return OP_STYLES.get(op, OTHER)


def ordered_ops(ops: set[str]) -> list[str]:
    """Ops in the order of legends, then others by name."""
    return [op for op in OP_STYLES if op in ops] + sorted(ops - OP_STYLES.keys())


def shades(op: str, theme: Theme, count: int) -> list[str]:
    """A fill (#rrggbb) for each of a rank's `count` chunks: the op's, then even steps towards the background."""
    fill, background = getattr(op_style(op), theme), BACKGROUNDS[theme]
    return [mixed(fill, background, FAINTEST * chunk / max(count - 1, 1)) for chunk in range(count)]


def mixed(fill: str, other: str, share: float) -> str:
    """A colour (#rrggbb) mixed with this share of another."""
    channels = ((int(fill[i : i + 2], 16), int(other[i : i + 2], 16)) for i in (1, 3, 5))
    return "#" + "".join(f"{round(a + (b - a) * share):02x}" for a, b in channels)


def text_colour(fill: str) -> str:
    """White if legible on `fill` (#rrggbb), that is, with a WCAG 2 contrast of at least 3.5; else near black."""
    red, green, blue = (_linear(int(fill[i : i + 2], 16) / 255) for i in (1, 3, 5))
    luminance = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    return "#ffffff" if 1.05 / (luminance + 0.05) >= 3.5 else "#16191f"


def _linear(value: float) -> float:
    return value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4


def row_of(lane: str) -> str:
    """The row in which a lane is drawn: all sends of a rank share one, whatever their peers, and so do all receives,
    and the copies to and from host memory."""
    rows = {"SEND": "send", "RECV": "receive", "offl": "copy", "relo": "copy"}
    return rows.get(lane[:4], lane)


def row_order(rows: Iterable[str]) -> list[str]:
    """Distinct rows in drawing order: compute, messages inside layers, transfers, collectives, copies, then any others
    by name."""
    return sorted(set(rows), key=lambda row: (ROWS.index(row) if row in ROWS else len(ROWS), row))


def zero_of(timeline: Timeline) -> float:
    """Time zero, in seconds, in the drawing of one step: its first compute start, else its first start."""
    starts = [span.start for span in timeline.spans if span.op in COMPUTE]
    return min(starts or [span.start for span in timeline.spans])


def nanoseconds(span: Span, zero: float) -> tuple[int, int]:
    """Start and end in integer nanoseconds after `zero` (seconds), so that spans that touch still touch."""
    return round((span.start - zero) * 1e9), round((span.end - zero) * 1e9)


def stack_overlaps(times: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """(level, number of levels) of each (start, end) pair, sorted by start, so that overlapping spans share a row.

    The number of levels is that of the overlapping group: a span that overlaps no other gets the full height, (0, 1).
    """
    levels: list[int] = []
    depths: list[int] = []
    ends: list[int] = []
    for start, end in times:
        if not ends or start >= max(ends):
            depths += [len(ends)] * (len(levels) - len(depths))
            ends = []
        level = next((i for i, busy_until in enumerate(ends) if busy_until <= start), len(ends))
        ends[level : level + 1] = [end]
        levels.append(level)
    depths += [len(ends)] * (len(levels) - len(depths))
    return list(zip(levels, depths, strict=True))
