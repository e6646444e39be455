"""Reads the pages that schedules/draw/html.py writes."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser

import pytest

from pentad.schedules.compiler import compile_program
from pentad.schedules.draw.html import SimulatedProgram, schedule_page
from pentad.schedules.draw.palette import row_of
from pentad.schedules.simulate.costs import Costs
from pentad.schedules.simulate.simulate import simulate
from pentad.schedules.simulate.timeline import Span, Timeline

NAMES = ["1f1b", "zb-h2", "zb-v", "interleaved-zb", "dualpipe", "seq-1f1b", "zb-h2 post-validation"]


class Page(HTMLParser):
    """The tags of a page in order, its links, and the text after each tag."""

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
    """The table of distinct instructions with ops, lanes and names as text."""
    op, lane = ([kinds[f"{column}s"][index] for index in kinds[column]] for column in ("op", "lane"))
    parts = zip(kinds["stage"], op, kinds["microbatch"], strict=True)
    usual = [f"{stage if stage >= 0 else ''}{name}{mb if mb >= 0 else ''}" for stage, name, mb in parts]
    names = [kinds["names"].get(str(number), name) for number, name in enumerate(usual)]
    return kinds | {"op": op, "lane": lane, "name": names}


def spans_of(data: dict, panel: dict) -> list[Span]:
    """The spans of a panel, decoded as `schedules.draw.html._timelines` says."""
    found = []
    kinds = spelled_out(data["kinds"])
    for step in panel["steps"]:
        for rank in step["ranks"]:
            for track in rank["tracks"]:
                time = 0
                for kind, gap, length in zip(track["kind"], track["gap"], track["length"], strict=True):
                    time += gap
                    name, op, lane = (kinds[column][kind] for column in ("name", "op", "lane"))
                    assert track["row"] == row_of(lane)
                    stage, microbatch, peer = (kinds[column][kind] for column in ("stage", "microbatch", "peer"))
                    start, end = (step["zero"] + nanos * 1e-9 for nanos in (time, time + length))
                    found.append(Span(step["step"], rank["rank"], lane, name, op, stage, microbatch, peer, start, end))
    return sorted(found)


def assert_holds(data: dict, panel: dict, timeline: Timeline) -> None:
    """Asserts that the panel has every span of the timeline, to the nanosecond."""
    found, expected = spans_of(data, panel), sorted(timeline.spans)
    assert [span[:8] for span in found] == [span[:8] for span in expected]
    assert [span[8] for span in found] == pytest.approx([span.start for span in expected], abs=1.1e-9, rel=0)
    assert [span[9] for span in found] == pytest.approx([span.end for span in expected], abs=1.1e-9, rel=0)


def keys_of(data: dict, panel: dict) -> list[tuple[int, str]]:
    """Rank and name of the spans of a panel, in order of their numbers."""
    names = spelled_out(data["kinds"])["name"]
    ranks = panel["steps"][0]["ranks"]
    return [(rank["rank"], names[kind]) for rank in ranks for track in rank["tracks"] for kind in track["kind"]]


def rows_of(data: dict, number: int) -> list[tuple[int, str]]:
    """Pipeline rank and name of each row of a program."""
    names, program = spelled_out(data["kinds"])["name"], data["programs"][number]
    ranks = [rank for rank, count in enumerate(program["counts"]) for _ in range(count)]
    return [(rank, names[kind]) for rank, kind in zip(ranks, program["kind"], strict=True)]


def dependencies_of(data: dict, number: int) -> dict[tuple[int, str], set[tuple[int, str]]]:
    """What each row of a program waits for, both as pipeline rank and name."""
    rows, dependencies = rows_of(data, number), data["programs"][number]["dependencies"]
    before = iter(dependencies["before"])
    counts = enumerate(dependencies["count"])
    found = {rows[row]: {rows[row - next(before)] for _ in range(count)} for row, count in counts}
    assert not list(before)
    return found


def page_of(*schedules: SimulatedProgram, limit: float | None = None) -> str:
    return schedule_page(schedules, title="t", facts={}, limit=limit)


def simulated_program(name: str, ranks: int = 4, microbatches: int = 8) -> SimulatedProgram:
    """A schedule on two replicas; 'NAME post-validation' validates its optimizer steps."""
    name, _, post_validation = name.partition(" ")
    program = compile_program(name, ranks, microbatches, replicas=2, post_validation=bool(post_validation))
    parts = {"chunks": program.chunks, "slices": program.slices}
    costs = Costs.uniform(program.stages, 1.0, 1.2, 0.8, **parts, transfer=0.07)
    return SimulatedProgram(program, costs, simulate(program, costs))
