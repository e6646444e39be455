"""What test_html.py shares with other tests."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser

from pentad.schedules.draw.palette import row_of
from pentad.schedules.simulate.timeline import Span


class Page(HTMLParser):
    """Elements, attributes and the text after each tag of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = ["page"]
        self.links: list[tuple[str, str | None]] = []
        self.texts: dict[str, str] = {}
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [pair for pair in attrs if pair[0] in ("src", "href", "action", "data", "srcset")]

    def handle_data(self, data: str) -> None:
        self.texts[self.tags[-1]] = self.texts.get(self.tags[-1], "") + data


def payload(page: str) -> dict:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found
    return json.loads(found[1])


def spelled_out(kinds: dict) -> dict[str, list]:
    """The table of kinds with ops, lanes and names as text."""
    op, lane = ([kinds[f"{what}s"][number] for number in kinds[what]] for what in ("op", "lane"))
    parts = zip(kinds["stage"], op, kinds["microbatch"], strict=True)
    usual = [f"{stage if stage >= 0 else ''}{of}{mb if mb >= 0 else ''}" for stage, of, mb in parts]
    names = [kinds["names"].get(str(number), name) for number, name in enumerate(usual)]
    return kinds | {"op": op, "lane": lane, "name": names}


def spans_of(data: dict, panel: dict) -> list[Span]:
    """The spans that a page holds, by the rule in the docstring of the payload."""
    found = []
    kinds = spelled_out(data["kinds"])
    for step in panel["steps"]:
        for rank in step["ranks"]:
            for track in rank["tracks"]:
                at = 0
                for kind, gap, length in zip(track["kind"], track["gap"], track["length"], strict=True):
                    at += gap
                    name, op, lane = (kinds[column][kind] for column in ("name", "op", "lane"))
                    assert track["row"] == row_of(lane)
                    stage, microbatch, peer = (kinds[column][kind] for column in ("stage", "microbatch", "peer"))
                    start, end = (step["zero"] + time * 1e-9 for time in (at, at + length))
                    where = (step["step"], rank["rank"], lane, name, op)
                    found.append(Span(*where, stage, microbatch, peer, start, end))
    return sorted(found)
