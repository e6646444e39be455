"""One self-contained HTML page that draws timelines one above the other, on one time axis.

The page's data is one JSON object of short columns: few bytes per span, exact to a nanosecond. Within a panel, spans
are numbered in the order of the page: by rank, by row, by time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from pentad.schedules.draw.page import html_page
from pentad.schedules.draw.page_program import (
    DrawnMemory,
    DrawnMessages,
    PathPiece,
    drawn_program,
    rank_groups,
    saved_activations,
)
from pentad.schedules.draw.palette import (
    BACKGROUNDS,
    nanoseconds,
    op_style,
    ordered_ops,
    row_of,
    row_order,
    shades,
    stack_overlaps,
    text_colour,
    zero_of,
)
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.ir.program import Program
from pentad.schedules.simulate.costs import Costs
from pentad.schedules.simulate.critical_path import critical_path
from pentad.schedules.simulate.timeline import COMPUTE, Span, Timeline, grouped
from pentad.schedules.spec.mesh import Mesh

STYLES = ("page.css", "panels.css")
SCRIPTS = (
    *("data.js", "labels.js", "layout.js", "canvas.js", "paint.js", "program/links.js", "program/dependencies.js"),
    *("program/arrows.js", "program/memory_curve.js", "program/messages.js"),
    *("selection.js", "search.js", "tooltip.js", "navigation.js", "main.js"),
)
_Kind = tuple[str, str, str, int, int, int]  # name, op, lane, stage, microbatch, peer
_Placement = tuple[tuple[int, ...], ...]  # stages of each rank
_Row = tuple[str, list[Span]]
_RankRows = tuple[int, list[_Row]]
_Paths = Mapping[int, Sequence[PathPiece]]  # by step


class _Drawn(NamedTuple):
    timeline: Timeline
    placement: _Placement | None
    paths: _Paths


class SimulatedProgram(NamedTuple):
    """A program and its simulated step at these costs."""

    program: Program
    costs: Costs
    timeline: Timeline


class RunProgram(NamedTuple):
    """The program that a run's steps executed over the ranks of its mesh, and the memory that it takes, if known.
    `paths` has the critical paths of each timeline by step; a step without one ran some other, unknown program.
    `messages` are those planned inside layers."""

    program: Program
    mesh: Mesh
    memory: DrawnMemory | None
    paths: Sequence[_Paths]
    messages: Sequence[DrawnMessages] = ()


def timeline_page(
    timelines: Sequence[Timeline], *, title: str, facts: dict[str, str], figure: str = "", run: RunProgram | None = None
) -> str:
    """The page of a run: a panel per timeline, whose step the reader chooses, and below the panels `figure`, the SVG
    text of a figure, if not empty. Times are in seconds. With `run`, it also shows dependencies, the critical path and
    memory.

    Time zero of a panel is the first compute start of its step. Raises PentadError if there is no span to draw.
    """
    paths = run.paths if run else [None] * len(timelines)
    drawn = [
        _Drawn(timeline, None, path or {}) for timeline, path in zip(timelines, paths, strict=True) if timeline.spans
    ]
    if not drawn:
        raise PentadError("timeline_page has no spans to draw: expected a timeline with at least one")
    data = _timelines(drawn) | {"unit": "s", "programs": []}
    if run is not None:
        data["programs"].append(drawn_program(run.program, run.memory, _numbers(data["kinds"]), run.messages))
        if any(each.exposed for each in run.messages):
            data["looks"]["LAYERS"] = _look("LAYERS", 1)
        for panel in data["panels"]:
            panel |= {"program": 0, "groups": rank_groups(run.mesh)}
    return _page(data, title, facts, figure)


def schedule_page(
    schedules: Sequence[SimulatedProgram], *, title: str, facts: dict[str, str], limit: float | None = None
) -> str:
    """The page of schedules: timelines, dependencies, critical paths and the activations that each rank saves.

    Times are in the unit of the costs. `limit` is drawn as the most activations that a rank may save, in microbatches
    of all its layers.
    """
    paths = [
        [PathPiece(part.rank, part.key, "", part.start, part.end) for part in critical_path(one.program, one.costs)]
        for one in schedules
    ]
    drawn = [
        _Drawn(one.timeline, one.program.placement, dict.fromkeys(one.timeline.steps, path))
        for one, path in zip(schedules, paths, strict=True)
    ]
    data = _timelines(drawn) | {"unit": "", "programs": []}
    numbers = _numbers(data["kinds"])
    for number, (panel, one) in enumerate(zip(data["panels"], schedules, strict=True)):
        data["programs"].append(drawn_program(one.program, saved_activations(one.program, limit), numbers))
        panel |= {"program": number, "groups": rank_groups(Mesh(pp=one.program.ranks))}
    return _page(data, title, facts)


def _page(data: dict[str, Any], title: str, facts: dict[str, str], figure: str = "") -> str:
    return html_page("page.html", data, title=title, facts=facts, styles=STYLES, scripts=SCRIPTS, figure=figure)


# ---- timelines ----


def _timelines(drawn: list[_Drawn]) -> dict[str, Any]:
    """A table of distinct instructions (`kinds`) and, for each panel, step, rank and row, columns of its spans.

    `kind` is an index into the table, `gap` is start minus the previous start, `length` is end minus start, both in
    nanoseconds. Without a placement, a rank's stages are in ascending order. `parts` are the kinds of critical-path
    pieces.
    """
    kinds: dict[_Kind, int] = {}
    pieces = (piece for one in drawn for path in one.paths.values() for piece in path)
    parts = {kind: number for number, kind in enumerate(dict.fromkeys(piece.kind for piece in pieces))}
    panels = [_panel(one, kinds, parts) for one in drawn]
    chunks = max(1, *(len(rank["stages"]) for panel in panels for step in panel["steps"] for rank in step["ranks"]))
    return {
        "kinds": _table(list(kinds)),
        "looks": {op: _look(op, chunks if op in COMPUTE else 1) for op in ordered_ops({kind[1] for kind in kinds})},
        "rows": row_order(row_of(kind[2]) for kind in kinds),
        "parts": list(parts),
        "panels": panels,
    }


def _table(kinds: list[_Kind]) -> dict[str, Any]:
    """Ops and lanes as indices; `names` has only those names that are not just stage, op and microbatch joined."""
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


def _numbers(kinds: dict[str, Any]) -> dict[str, int]:
    """The first kind with each instruction name."""
    parts = zip(kinds["stage"], kinds["op"], kinds["microbatch"], strict=True)
    names = [f"{_number(stage)}{kinds['ops'][op]}{_number(microbatch)}" for stage, op, microbatch in parts]
    named = (kinds["names"].get(str(number), name) for number, name in enumerate(names))
    found: dict[str, int] = {}
    for number, name in enumerate(named):
        found.setdefault(name, number)
    return found


def _number(value: int) -> str:
    return str(value) if value >= 0 else ""


def _look(op: str, chunks: int) -> dict[str, Any]:
    fills: dict[str, list[str]] = {theme: shades(op, theme, chunks) for theme in BACKGROUNDS}
    text = {f"{theme}Text": list(map(text_colour, fills[theme])) for theme in fills}
    return {"label": op_style(op).label, **fills, **text}


def _panel(drawn: _Drawn, kinds: dict[_Kind, int], parts: dict[str, int]) -> dict[str, Any]:
    source, by_step = drawn.timeline.source, grouped(drawn.timeline.spans, lambda span: span.step)
    steps = []
    for step in sorted(by_step):
        timeline = Timeline(source, tuple(by_step[step]))
        rows, path = _rows(timeline), drawn.paths.get(step)
        drawn_path = None if path is None else _path(path, rows, zero_of(timeline), parts)
        steps.append(_step(timeline, rows, drawn.placement, kinds) | {"path": drawn_path})
    return {"source": source, "steps": steps}


def _path(path: Sequence[PathPiece], rows: list[_RankRows], zero: float, parts: dict[str, int]) -> dict[str, Any]:
    """The pieces of a critical path: the span, kind and length of each. The first starts at `begin`, and each of the
    others where the one before it ends. Times are in nanoseconds after `zero`."""
    spans = (span for _, own in rows for _, row in own for span in row)
    number = {(span.rank, span.name): n for n, span in enumerate(spans)}
    times = [round((time - zero) * 1e9) for time in (path[0].start, *(piece.end for piece in path))]
    return {
        "begin": times[0],
        "number": [number[piece.rank, piece.name] for piece in path],
        "part": [parts[piece.kind] for piece in path],
        "length": [end - start for start, end in pairwise(times)],
    }


def _step(
    timeline: Timeline, rows: list[_RankRows], placement: _Placement | None, kinds: dict[_Kind, int]
) -> dict[str, Any]:
    """One step. Makespan, longest and bubble are null if it has no compute."""
    busy, zero = timeline.busy_by_rank, zero_of(timeline)
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
            "tracks": [{"row": row, **_columns(spans, zero, kinds)} for row, spans in own],
        }
        for rank, own in rows
    ]
    return {
        "step": timeline.spans[0].step,
        "zero": zero,
        "makespan": makespan,
        "longest": timeline.longest if has_compute else None,
        "bubble": {"makespan": bubble.makespan, "longest": bubble.longest} if bubble else None,
        "ranks": ranks,
    }


def _rows(timeline: Timeline) -> list[_RankRows]:
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
