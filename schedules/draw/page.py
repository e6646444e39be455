"""A self-contained HTML page: a title, facts, a body, and a script that draws the page's data."""

from __future__ import annotations

import base64
import html
import json
import re
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

_FRAME = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{{title}}</title>
<style>
{{style}}
</style>
</head>
<body>
<header>
  <h1>{{title}}</h1>
  <dl class="facts">{{facts}}</dl>
</header>
{{body}}
<script type="application/json" id="data">{{data}}</script>
<script>
{{script}}
</script>
</body>
</html>
"""


def html_page(
    body: str,
    data: Any,
    *,
    title: str,
    facts: Mapping[str, str],
    styles: Sequence[str],
    scripts: Sequence[str],
    figure: str = "",
) -> str:
    """The text of the page. `body`, `styles` and `scripts` are names of assets; the scripts find `data` as JSON in the
    element #data. `figure`, if not empty, is the text of an SVG figure, which replaces {{figure}} in the body."""
    parts = {
        "title": html.escape(title),
        "facts": "".join(f"<div><dt>{html.escape(k)}</dt><dd>{html.escape(v)}</dd></div>" for k, v in facts.items()),
        "body": _asset(body).replace("{{figure}}", _figure(figure) if figure else ""),
        "style": "".join(map(_asset, styles)),
        "data": _json(data),
        "script": "".join(map(_asset, scripts)),
    }
    # One pass, so that a placeholder within a title or a name stays text.
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]].rstrip("\n"), _FRAME)


def _figure(svg: str) -> str:
    """The figure as an image, so that its styles do not affect the page."""
    name = html.escape(svg.partition("<title>")[2].partition("</title>")[0])
    data = base64.b64encode(svg.encode()).decode()
    return f'<figure><img alt="{name}" src="data:image/svg+xml;base64,{data}"></figure>'


def _asset(name: str) -> str:
    return (files("pentad.schedules.draw") / "assets" / name).read_text(encoding="utf-8")


def _json(value: Any) -> str:
    """JSON that cannot close or comment out the <script> element that contains it."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
