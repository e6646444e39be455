"""Timelines as pixels, for viewers that cannot show SVG: a row of colours per rank, without text."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pentad.schedules.draw.palette import BACKGROUNDS, op_style
from pentad.schedules.simulate.timeline import Timeline, grouped

WIDTH, ROW, GAP = 1200, 16, 2  # pixels
IDLE = (238, 240, 243)


def timeline_pixels(timeline: Timeline) -> NDArray[np.uint8]:
    """[height, WIDTH, 3] uint8: the compute of one step, rank 0 at the top; idle time is grey."""
    by_rank = grouped(timeline.compute, lambda span: span.rank)
    first, scale = min(span.start for span in timeline.compute), WIDTH / max(timeline.makespan, 1e-9)
    found = np.full(((ROW + GAP) * len(by_rank) + GAP, WIDTH, 3), _rgb(BACKGROUNDS["light"]), np.uint8)
    for number, rank in enumerate(sorted(by_rank)):
        row = found[GAP + number * (ROW + GAP) :][:ROW]
        row[:] = IDLE
        for span in by_rank[rank]:
            start, end = (round((at - first) * scale) for at in (span.start, span.end))
            row[:, start : max(end, start + 1)] = _rgb(op_style(span.op).light)
    return found


def _rgb(colour: str) -> tuple[int, ...]:
    return tuple(bytes.fromhex(colour.removeprefix("#")))
