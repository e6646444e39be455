"""One self-contained HTML page that draws timelines one above the other, linked in time."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from pentad.schedules.draw.page_program import Drawn, program_payload
from pentad.schedules.draw.page_spans import spans_payload
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.simulate.timeline import Timeline

STYLES = ("page.css", "page_panels.css", "page_choice.css")
SCRIPTS = (
    "page_data.js",
    "page_words.js",
    "page_layout.js",
    "page_draw.js",
    "page_spans.js",
    "page_links.js",
    "page_choice.js",
    "page_arrows.js",
    "page_memory.js",
    "page_tip.js",
    "page_move.js",
    "page.js",
)


def timeline_page(simulated: Timeline | None, measured: Timeline | None, *, title: str, facts: dict[str, str]) -> str:
    """The page as text. Time zero of a panel is the first compute start of the step shown; times are kept to 1 ns.

    Raises PentadError if there is no span to draw.
    """
    timelines = [timeline for timeline in (simulated, measured) if timeline and timeline.spans]
    if not timelines:
        raise PentadError("timeline_page has no spans to draw: expected a simulated or a measured timeline with some")
    return _page(spans_payload(timelines, [None] * len(timelines)) | {"unit": "s"}, title, facts)


def schedule_page(shown: Sequence[Drawn], *, title: str, facts: dict[str, str], limit: float | None = None) -> str:
    """The page of one schedule, or of several on one time axis, as text: with what every instruction waits for, the
    activations that each rank keeps, and the critical path. Times have the unit of the costs; `limit` is the most
    activations that a rank may keep, in microbatches of a whole rank."""
    data = spans_payload([one.timeline for one in shown], [one.program.placement for one in shown])
    for panel, one in zip(data["panels"], shown, strict=True):
        panel["program"] = program_payload(one, limit)
    return _page(data | {"unit": ""}, title, facts)


def _page(data: dict[str, Any], title: str, facts: dict[str, str]) -> str:
    parts = {
        "title": html.escape(title),
        "facts": "".join(f"<div><dt>{html.escape(k)}</dt><dd>{html.escape(v)}</dd></div>" for k, v in facts.items()),
        "style": "".join(map(_file, STYLES)),
        "data": _json(data),
        "script": "".join(map(_file, SCRIPTS)),
    }
    # One pass, so that a placeholder inside a title or a name stays text.
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], _file("page.html"))


def _file(name: str) -> str:
    return (files("pentad.schedules.draw") / "assets" / name).read_text(encoding="utf-8")


def _json(value: Any) -> str:
    """JSON that cannot close or comment out the <script> element around it."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
