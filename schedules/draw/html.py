"""One self-contained HTML page that draws timelines one above the other, on one time axis.

The page's data is one JSON object of short columns: few bytes per span, exact to a nanosecond. Within a panel, spans
are numbered in the order of the page: by rank, by row, by time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from pentad.schedules.draw.page import html_page
from pentad.schedules.draw.palette import (
    BACKGROUNDS,
    OP_STYLES,
    grouped,
    nanoseconds,
    op_style,
    row_of,
    row_order,
    shades,
    stack_overlaps,
    text_colour,
    zero_of,
)
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.ir.instruction import RECEIVES, SENDS, Instruction, Overlap
from pentad.schedules.ir.program import Program
from pentad.schedules.simulate.costs import Costs
from pentad.schedules.simulate.critical_path import critical_path
from pentad.schedules.simulate.memory import activations_over_time
from pentad.schedules.simulate.timeline import COMPUTE, Span, Timeline

STYLES = ("page.css", "panels.css")
SCRIPTS = (
    *("data.js", "labels.js", "layout.js", "canvas.js", "paint.js", "dependencies.js", "arrows.js"),
    *("selection.js", "search.js", "activations.js", "tooltip.js", "navigation.js", "main.js"),
)
_Kind = tuple[str, str, str, int, int, int]  # name, op, lane, stage, microbatch, peer
_Placement = tuple[tuple[int, ...], ...]  # stages of each rank
_Row = tuple[str, list[Span]]


class SimulatedProgram(NamedTuple):
    """A program and its simulated step at these costs."""

    program: Program
    costs: Costs
    timeline: Timeline


def timeline_page(timelines: Sequence[Timeline], *, title: str, facts: dict[str, str], figure: str = "") -> str:
    """The page of a run: a panel per timeline, of which the reader chooses a step, and below them the SVG text of a
    figure, if there is one. Times are in seconds.

    Time zero of a panel is the first compute start of its step. Raises PentadError if there is no span to draw.
    """
    drawn = [timeline for timeline in timelines if timeline.spans]
    if not drawn:
        raise PentadError("timeline_page has no spans to draw: expected a timeline with at least one")
    return _page(_timelines(drawn, [None] * len(drawn)) | {"unit": "s"}, title, facts, figure)


def schedule_page(
    schedules: Sequence[SimulatedProgram], *, title: str, facts: dict[str, str], limit: float | None = None
) -> str:
    """The page of schedules: also shows dependencies, the critical path and the activations that each rank saves.

    Times have the unit of the costs. `limit` is drawn as the most activations that a rank may save, in microbatches of
    all its layers.
    """
    data = _timelines([one.timeline for one in schedules], [one.program.placement for one in schedules])
    for panel, schedule in zip(data["panels"], schedules, strict=True):
        panel["program"] = _program(schedule, limit)
    return _page(data | {"unit": ""}, title, facts)


def _page(data: dict[str, Any], title: str, facts: dict[str, str], figure: str = "") -> str:
    return html_page("page.html", data, title=title, facts=facts, styles=STYLES, scripts=SCRIPTS, figure=figure)


# ---- timelines ----


def _timelines(timelines: list[Timeline], placements: list[_Placement | None]) -> dict[str, Any]:
    """A table of distinct instructions (`kinds`) and, for each panel, step, rank and row, columns of its spans.

    `kind` is an index into the table, `gap` is start minus the previous start, `length` is end minus start, both in
    nanoseconds. Without a placement, the stages of a rank are in ascending order.
    """
    kinds: dict[_Kind, int] = {}
    panels = [_panel(timeline, placement, kinds) for timeline, placement in zip(timelines, placements, strict=True)]
    ops_used = {kind[1] for kind in kinds}
    ops = [op for op in OP_STYLES if op in ops_used] + sorted(ops_used - OP_STYLES.keys())
    chunks = max(1, *(len(rank["stages"]) for panel in panels for step in panel["steps"] for rank in step["ranks"]))
    return {
        "kinds": _table(list(kinds)),
        "looks": {op: _look(op, chunks if op in COMPUTE else 1) for op in ops},
        "rows": row_order(row_of(kind[2]) for kind in kinds),
        "panels": panels,
    }


def _table(kinds: list[_Kind]) -> dict[str, Any]:
    """Ops and lanes as indices; `names` has only names other than stage, op and microbatch in one word."""
    ops, lanes = (list(dict.fromkeys(kind[column] for kind in kinds)) for column in (1, 2))
    op_index, lane_index = ({text: i for i, text in enumerate(texts)} for texts in (ops, lanes))
    return {
        "ops": ops,
        "lanes": lanes,
        "names": {str(i): k[0] for i, k in enumerate(kinds) if k[0] != f"{_number(k[3])}{k[1]}{_number(k[4])}"},
        "op": [op_index[kind[1]] for kind in kinds],
        "lane": [lane_index[kind[2]] for kind in kinds],
        **{name: [kind[column] for kind in kinds] for column, name in enumerate(("stage", "microbatch", "peer"), 3)},
    }


def _number(value: int) -> str:
    return str(value) if value >= 0 else ""


def _look(op: str, chunks: int) -> dict[str, Any]:
    fills: dict[str, list[str]] = {theme: shades(op, theme, chunks) for theme in BACKGROUNDS}
    text = {f"{theme}Text": list(map(text_colour, fills[theme])) for theme in fills}
    return {"label": op_style(op).label, **fills, **text}


def _panel(timeline: Timeline, placement: _Placement | None, kinds: dict[_Kind, int]) -> dict[str, Any]:
    by_step = grouped(timeline.spans, lambda span: span.step)
    steps = [_step(Timeline(timeline.source, tuple(by_step[step])), placement, kinds) for step in sorted(by_step)]
    return {"source": timeline.source, "steps": steps}


def _step(timeline: Timeline, placement: _Placement | None, kinds: dict[_Kind, int]) -> dict[str, Any]:
    """One step. Its figures are null without compute, for then there is no bubble."""
    busy, zero = timeline.busy_by_rank(), zero_of(timeline)
    computed = grouped((span for span in timeline.compute if span.stage >= 0), lambda span: span.rank)
    stages = {rank: sorted({span.stage for span in spans}) for rank, spans in computed.items()}
    has_compute = bool(busy) and timeline.longest > 0
    bubble = timeline.bubble() if has_compute else None
    makespan = timeline.makespan if has_compute else None
    ranks = [
        {
            "rank": rank,
            "busy": busy[rank][2] / makespan if makespan and rank in busy else None,
            "stages": placement[rank] if placement else stages.get(rank, []),
            "tracks": [{"row": row, **_columns(spans, zero, kinds)} for row, spans in rows],
        }
        for rank, rows in _rows(timeline)
    ]
    return {
        "step": timeline.spans[0].step,
        "zero": zero,
        "makespan": makespan,
        "longest": timeline.longest if has_compute else None,
        "bubble": {"makespan": bubble.makespan, "longest": bubble.longest} if bubble else None,
        "ranks": ranks,
    }


def _rows(timeline: Timeline) -> list[tuple[int, list[_Row]]]:
    """The spans of one step in the order of the page. Spans of one lane keep their order."""
    zero = zero_of(timeline)
    by_rank = grouped(timeline.spans, lambda span: span.rank)
    found = []
    for rank in sorted(by_rank):
        by_row = grouped(by_rank[rank], lambda span: row_of(span.lane))
        rows = [(row, sorted(by_row[row], key=lambda s: nanoseconds(s, zero))) for row in row_order(by_row)]
        found.append((rank, rows))
    return found


def _columns(spans: list[Span], zero: float, kinds: dict[_Kind, int]) -> dict[str, list[int]]:
    times = [nanoseconds(span, zero) for span in spans]
    columns = {
        "kind": [kinds.setdefault((s.name, s.op, s.lane, s.stage, s.microbatch, s.peer), len(kinds)) for s in spans],
        "gap": [times[0][0], *(after[0] - before[0] for before, after in pairwise(times))],
        "length": [end - start for start, end in times],
    }
    levels = stack_overlaps(times)
    if any(depth > 1 for _, depth in levels):
        columns["level"] = [level for level, _ in levels]
        columns["depth"] = [depth for _, depth in levels]
    return columns


# ---- programs ----


def _program(schedule: SimulatedProgram, limit: float | None) -> dict[str, Any]:
    """What a page knows about a program besides its spans.

    `dependencies` has `count` span numbers for each span; `events` are groups of spans that run as one, a send with its
    receive or the members of a collective; `overlapped` are the first halves of overlapped pairs, whose results are
    available when the pair ends; `slots` has -1 for spans other than receives; `critical` is the critical path.
    """
    program = schedule.program
    spans = [span for _, rows in _rows(schedule.timeline) for _, row in rows for span in row]
    number = {(span.rank, span.name): i for i, span in enumerate(spans)}
    dependencies: list[list[int]] = [[] for _ in number]
    slots, overlapped = [-1] * len(number), []
    channels: dict[tuple, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, stream in enumerate(program.streams):
        for action in stream:
            if isinstance(action, Overlap):
                overlapped.append(number[rank, str(action.key)])
            elif channel := _channel(rank, action):
                channels[channel][rank].append(number[rank, str(action.key)])
            for part in action.parts:
                # The first half of a pair waits for what either half needs.
                waits = action.waits if part is action.parts[0] else part.waits
                i = number[rank, str(part.key)]
                dependencies[i] = [number[rank, str(key)] for key in dict.fromkeys(waits)]
                slots[i] = part.slot
    # The k-th send of a channel meets its k-th receive, and so do the members of a collective.
    events = [list(event) for sides in channels.values() for event in zip(*sides.values(), strict=True)]
    path = critical_path(program, schedule.costs)
    return {
        "name": program.name,
        "dependencies": {"count": list(map(len, dependencies)), "number": [i for some in dependencies for i in some]},
        "events": [event for event in events if len(event) > 1],
        "overlapped": overlapped,
        "slots": slots,
        "critical": {"number": [number[part.rank, part.key] for part in path], "why": [part.why for part in path]},
        "activations": _activations(program, schedule.timeline, limit),
    }


def _channel(rank: int, part: Instruction) -> tuple | None:
    if part.op in SENDS:
        return part.op, rank, part.peer
    if part.op in RECEIVES:
        return RECEIVES[part.op], part.peer, rank
    return (part.lane, part.group) if part.group else None


def _activations(program: Program, timeline: Timeline, limit: float | None) -> dict[str, Any]:
    """Saved activations of each rank over time, in units of `unit` microbatches of all its layers."""
    unit, zero = 0.5 / (program.chunks * program.slices), zero_of(timeline)
    ranks = []
    for changes in activations_over_time(program, timeline):
        times = [round((time - zero) * 1e9) for time, _ in changes]
        gaps = [after - before for before, after in pairwise([0, *times])]
        ranks.append({"gap": gaps, "saved": [round(saved / unit) for _, saved in changes]})
    return {"unit": unit, "limit": limit, "ranks": ranks}
