"""One self-contained HTML page that draws simulated above measured timelines, linked in time."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterable
from importlib.resources import files
from itertools import pairwise
from typing import Any

from pentad.schedules.errors import PentadError
from pentad.schedules.palette import LOOKS, ink, look, nanoseconds, row_of, row_order, stack
from pentad.schedules.timeline import Span, Timeline

SCRIPTS = ("page_data.js", "page_layout.js", "page_draw.js", "page.js")
Kind = tuple[str, str, str, int, int, int]  # name, op, lane, stage, microbatch, peer


def timeline_page(simulated: Timeline | None, measured: Timeline | None, *, title: str, facts: dict[str, str]) -> str:
    """The page as text. Time zero of a panel is the first compute start of the step shown; times are kept to 1 ns.

    Raises PentadError if there is no span to draw.
    """
    timelines = [timeline for timeline in (simulated, measured) if timeline and timeline.spans]
    if not timelines:
        raise PentadError("timeline_page has no spans to draw, wanted a simulated or a measured timeline with some")
    parts = {
        "title": html.escape(title),
        "facts": "".join(f"<div><dt>{html.escape(k)}</dt><dd>{html.escape(v)}</dd></div>" for k, v in facts.items()),
        "style": _file("page.css"),
        "data": _json(_payload(timelines)),
        "script": "".join(map(_file, SCRIPTS)),
    }
    # One pass, so that a placeholder inside a title or a name stays text.
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], _file("page.html"))


def _file(name: str) -> str:
    return (files("pentad.schedules") / name).read_text(encoding="utf-8")


def _json(value: Any) -> str:
    """JSON that cannot close or comment out the <script> element around it."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _payload(timelines: list[Timeline]) -> dict[str, Any]:
    """Spans as columns: a table of distinct instructions (`kinds`), and per track an index into it, gap and length.

    `gap` is start minus the previous start and `length` is end minus start, both in nanoseconds.
    """
    kinds: dict[Kind, int] = {}
    panels = [_panel(timeline, kinds) for timeline in timelines]
    names = ("name", "op", "lane", "stage", "microbatch", "peer")
    used = {kind[1] for kind in kinds}
    ops = [op for op in LOOKS if op in used] + sorted(used - LOOKS.keys())
    return {
        "kinds": {name: [kind[i] for kind in kinds] for i, name in enumerate(names)},
        "looks": {op: _look(op) for op in ops},
        "rows": row_order(row_of(kind[2]) for kind in kinds),
        "panels": panels,
    }


def _look(op: str) -> dict[str, str]:
    chosen = look(op)
    return {
        "label": chosen.label,
        "light": chosen.light,
        "dark": chosen.dark,
        "lightInk": ink(chosen.light),
        "darkInk": ink(chosen.dark),
    }


def _panel(timeline: Timeline, kinds: dict[Kind, int]) -> dict[str, Any]:
    by_step = _grouped(timeline.spans, lambda span: span.step)
    return {
        "source": timeline.source,
        "steps": [_step(Timeline(timeline.source, tuple(by_step[step])), kinds) for step in sorted(by_step)],
    }


def _step(timeline: Timeline, kinds: dict[Kind, int]) -> dict[str, Any]:
    """One step. Its figures are null where nothing was computed, for there is no bubble without work."""
    busy = timeline.by_rank()
    zero = min((start for start, _, _ in busy.values()), default=min(span.start for span in timeline.spans))
    drawable = bool(busy) and timeline.longest > 0
    bubble = timeline.bubble() if drawable else None
    makespan = timeline.makespan if drawable else None
    by_rank = _grouped(timeline.spans, lambda span: span.rank)
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
                "tracks": _tracks(by_rank[rank], zero, kinds),
            }
            for rank in sorted(by_rank)
        ],
    }


def _tracks(spans: list[Span], zero: float, kinds: dict[Kind, int]) -> list[dict[str, Any]]:
    by_row = _grouped(spans, lambda span: row_of(span.lane))
    return [{"row": row, **_columns(by_row[row], zero, kinds)} for row in row_order(by_row)]


def _columns(spans: list[Span], zero: float, kinds: dict[Kind, int]) -> dict[str, list[int]]:
    timed = sorted(((*nanoseconds(span, zero), span) for span in spans), key=lambda item: item[:2])
    times = [(start, end) for start, end, _ in timed]
    columns = {
        "kind": [
            kinds.setdefault((s.name, s.op, s.lane, s.stage, s.microbatch, s.peer), len(kinds)) for *_, s in timed
        ],
        "gap": [times[0][0], *(after[0] - before[0] for before, after in pairwise(times))],
        "length": [end - start for start, end in times],
    }
    places = stack(times)
    if any(depth > 1 for _, depth in places):
        columns["level"] = [level for level, _ in places]
        columns["depth"] = [depth for _, depth in places]
    return columns


def _grouped(spans: Iterable[Span], key: Any) -> dict[Any, list[Span]]:
    found: dict[Any, list[Span]] = {}
    for span in spans:
        found.setdefault(key(span), []).append(span)
    return found
