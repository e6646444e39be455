"""Spans as the columns that a page holds: few bytes a span, exact to a nanosecond."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Any

from pentad.schedules.draw.palette import GROUNDS, LOOKS, ink, look, nanoseconds, row_of, row_order, shades, stack
from pentad.schedules.simulate.timeline import COMPUTE, Span, Timeline

Kind = tuple[str, str, str, int, int, int]  # name, op, lane, stage, microbatch, peer
Stages = tuple[tuple[int, ...], ...]  # by rank, a rank's first chunk first


def spans_payload(timelines: list[Timeline], placements: list[Stages | None]) -> dict[str, Any]:
    """A table of distinct instructions (`kinds`), and per panel, step, rank and row an index into it, gap and length.

    `gap` is start minus the previous start and `length` is end minus start, both in nanoseconds. A timeline whose
    placement is None has the stages of a rank in their own order.
    """
    kinds: dict[Kind, int] = {}
    panels = [_panel(timeline, placed, kinds) for timeline, placed in zip(timelines, placements, strict=True)]
    used = {kind[1] for kind in kinds}
    ops = [op for op in LOOKS if op in used] + sorted(used - LOOKS.keys())
    ranks = [rank for panel in panels for step in panel["steps"] for rank in step["ranks"]]
    chunks = max(1, *(len(rank["stages"]) for rank in ranks))
    return {
        "kinds": _table(list(kinds)),
        "looks": {op: _look(op, chunks if op in COMPUTE else 1) for op in ops},
        "rows": row_order(row_of(kind[2]) for kind in kinds),
        "panels": panels,
    }


def drawn(timeline: Timeline) -> list[tuple[int, list[tuple[str, list[Span]]]]]:
    """The spans of one step in the order of the page: by rank, by row, by time. Those of a lane stay in its order."""
    zero = zero_of(timeline)
    by_rank = grouped(timeline.spans, lambda span: span.rank)
    found = []
    for rank in sorted(by_rank):
        by_row = grouped(by_rank[rank], lambda span: row_of(span.lane))
        rows = [(row, sorted(by_row[row], key=lambda s: nanoseconds(s, zero))) for row in row_order(by_row)]
        found.append((rank, rows))
    return found


def zero_of(timeline: Timeline) -> float:
    """Time zero of a step's drawing: its first compute start, else its first start."""
    starts = [span.start for span in timeline.spans if span.op in COMPUTE]
    return min(starts or [span.start for span in timeline.spans])


def grouped(spans: Iterable[Span], key: Any) -> dict[Any, list[Span]]:
    found: dict[Any, list[Span]] = {}
    for span in spans:
        found.setdefault(key(span), []).append(span)
    return found


def _table(kinds: list[Kind]) -> dict[str, Any]:
    """Ops and lanes by number; `names` has only those that are not stage, op and microbatch in one word."""
    ops, lanes = (list(dict.fromkeys(kind[column] for kind in kinds)) for column in (1, 2))
    op_number, lane_number = ({text: i for i, text in enumerate(texts)} for texts in (ops, lanes))
    numbers = ("stage", "microbatch", "peer")
    return {
        "ops": ops,
        "lanes": lanes,
        "names": {str(i): k[0] for i, k in enumerate(kinds) if k[0] != f"{_number(k[3])}{k[1]}{_number(k[4])}"},
        "op": [op_number[kind[1]] for kind in kinds],
        "lane": [lane_number[kind[2]] for kind in kinds],
        **{name: [kind[column] for kind in kinds] for column, name in enumerate(numbers, 3)},
    }


def _number(value: int) -> str:
    return str(value) if value >= 0 else ""


def _look(op: str, chunks: int) -> dict[str, Any]:
    chosen = look(op)
    light, dark = (
        shades(fill, ground, chunks) for fill, ground in zip((chosen.light, chosen.dark), GROUNDS, strict=True)
    )
    inks = {"lightInk": list(map(ink, light)), "darkInk": list(map(ink, dark))}
    return {"label": chosen.label, "light": light, "dark": dark, **inks}


def _panel(timeline: Timeline, placed: Stages | None, kinds: dict[Kind, int]) -> dict[str, Any]:
    by_step = grouped(timeline.spans, lambda span: span.step)
    steps = [_step(Timeline(timeline.source, tuple(by_step[step])), placed, kinds) for step in sorted(by_step)]
    return {"source": timeline.source, "steps": steps}


def _step(timeline: Timeline, placed: Stages | None, kinds: dict[Kind, int]) -> dict[str, Any]:
    """One step. Its figures are null where nothing was computed, for there is no bubble without work."""
    busy = timeline.by_rank()
    zero = zero_of(timeline)
    drawable = bool(busy) and timeline.longest > 0
    bubble = timeline.bubble() if drawable else None
    makespan = timeline.makespan if drawable else None
    return {
        "step": timeline.spans[0].step,
        "zero": zero,
        "makespan": makespan,
        "longest": timeline.longest if drawable else None,
        "bubble": {"makespan": bubble.makespan, "longest": bubble.longest} if bubble else None,
        "ranks": [
            {
                "rank": rank,
                "busy": busy[rank][2] / makespan if makespan and rank in busy else None,
                "stages": placed[rank] if placed else _stages(rows),
                "tracks": [{"row": row, **_columns(spans, zero, kinds)} for row, spans in rows],
            }
            for rank, rows in drawn(timeline)
        ],
    }


def _stages(rows: list[tuple[str, list[Span]]]) -> list[int]:
    return sorted({span.stage for _, spans in rows for span in spans if span.op in COMPUTE and span.stage >= 0})


def _columns(spans: list[Span], zero: float, kinds: dict[Kind, int]) -> dict[str, list[int]]:
    times = [nanoseconds(span, zero) for span in spans]
    columns = {
        "kind": [kinds.setdefault((s.name, s.op, s.lane, s.stage, s.microbatch, s.peer), len(kinds)) for s in spans],
        "gap": [times[0][0], *(after[0] - before[0] for before, after in pairwise(times))],
        "length": [end - start for start, end in times],
    }
    places = stack(times)
    if any(depth > 1 for _, depth in places):
        columns["level"] = [level for level, _ in places]
        columns["depth"] = [depth for _, depth in places]
    return columns
