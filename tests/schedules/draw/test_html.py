"""The page of a run: self-contained, exact to a nanosecond, safe against any text."""

from __future__ import annotations

import pytest
from html_pages import Page, assert_holds, payload, spans_of

from pentad.schedules.compiler import compile_program
from pentad.schedules.draw.html import timeline_page
from pentad.schedules.draw.palette import ROWS, row_of, row_order, stack_overlaps, text_colour
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.simulate.costs import Costs
from pentad.schedules.simulate.simulate import simulate
from pentad.schedules.simulate.timeline import Span, Timeline

HOSTILE = "</script><b>&\"'<!--{{data}}\u2028</title>"


def simulated(name: str = "zb-h1", microbatches: int = 8, step: int = 0) -> Timeline:
    program = compile_program(name, 4, microbatches, replicas=2)
    return simulate(program, Costs.uniform(program.stages, 1e-3, 1.1e-3, 0.9e-3, transfer=7e-5), step=step)


def measured(steps: tuple[int, ...] = (3,)) -> Timeline:
    """The simulated spans, 7 % slower, on another clock, once per step."""
    spans = [
        span._replace(step=step, start=1e5 + step + span.start * 1.07, end=1e5 + step + span.end * 1.07)
        for step in steps
        for span in simulated().spans
    ]
    return Timeline("measured", tuple(spans))


@pytest.mark.parametrize("name", ["1f1b", "zb-h2", "dualpipe"])
def test_the_page_holds_every_span_to_a_nanosecond(name: str) -> None:
    timelines = [measured((3, 4)), simulated(name)]
    data = payload(timeline_page(timelines, title="t", facts={}))
    assert [panel["source"] for panel in data["panels"]] == ["measured", "simulated"]
    for panel, timeline in zip(data["panels"], timelines, strict=True):
        assert_holds(data, panel, timeline)


def test_the_page_is_self_contained() -> None:
    text = timeline_page([measured(), simulated()], title="t", facts={"run": "quickstart"})
    page = Page(text)
    assert page.links == []
    assert "link" not in page.tags and "img" not in page.tags and page.tags.count("script") == 2
    for reference in ("http:", "https:", "//cdn", "@import", "url(", "fetch(", "XMLHttpRequest", "import("):
        assert reference not in text


@pytest.mark.parametrize("steps", [(3,), (3, 4, 7)])
def test_every_step_has_both_of_its_bubble_figures(steps: tuple[int, ...]) -> None:
    timeline = measured(steps)
    panels = payload(timeline_page([timeline, simulated()], title="t", facts={}))["panels"]
    assert [step["step"] for step in panels[0]["steps"]] == list(steps)
    for panel, source in zip(panels, (timeline, simulated()), strict=True):
        for step in panel["steps"]:
            own = source.of_step(step["step"])
            assert step["bubble"] == {"longest": own.bubble().longest, "makespan": own.bubble().makespan}
            assert (step["makespan"], step["longest"]) == (own.makespan, own.longest)
            assert step["zero"] == min(span.start for span in own.compute)


def test_no_text_becomes_markup() -> None:
    spans = [span._replace(name=HOSTILE, lane=HOSTILE) if span.op == "NORM" else span for span in simulated().spans]
    text = timeline_page([Timeline("simulated", tuple(spans))], title=HOSTILE, facts={HOSTILE: HOSTILE})
    plain = timeline_page([simulated()], title="t", facts={"k": "v"})
    page = Page(text)
    assert page.tags == Page(plain).tags
    assert page.texts["h1"].strip() == page.texts["dt"].strip() == page.texts["dd"].strip() == HOSTILE
    assert HOSTILE in payload(text)["kinds"]["names"].values()


def test_a_step_without_compute_is_drawn_without_figures() -> None:
    spans = tuple(span._replace(step=1) for span in simulated().spans if span.op == "STEP")
    data = payload(timeline_page([Timeline("measured", spans)], title="t", facts={}))
    step = data["panels"][0]["steps"][0]
    assert step["bubble"] is None and step["makespan"] is None
    assert len(spans_of(data, data["panels"][0])) == len(spans)


@pytest.mark.parametrize("timelines", [[], [Timeline("simulated", ())]])
def test_a_page_without_spans_is_refused(timelines: list[Timeline]) -> None:
    with pytest.raises(PentadError, match="no spans to draw"):
        timeline_page(timelines, title="t", facts={})


def test_overlapping_spans_share_a_row_and_others_fill_it() -> None:
    times = [(0, 4), (1, 2), (2, 6), (6, 7), (6, 6), (7, 9)]
    assert stack_overlaps(times) == [(0, 2), (1, 2), (1, 2), (0, 2), (1, 2), (0, 1)]
    assert stack_overlaps([]) == []
    a, b = (Span(0, 0, "compute", f"0{op}1", op, 0, 1, -1, 0.0, 1.0) for op in ("F", "B"))
    track = payload(timeline_page([Timeline("simulated", (a, b))], title="t", facts={}))["panels"][0]["steps"][0]
    assert track["ranks"][0]["tracks"][0]["depth"] == [2, 2]


def test_rows_are_ordered_and_text_is_legible() -> None:
    assert row_order(["z", "gather", "send", "compute", "send", "a"]) == ["compute", "send", "gather", "a", "z"]
    assert [row_of(lane) for lane in ("SEND_F>3", "RECV_B<0", "reduce")] == ["send", "receive", "reduce"]
    assert set(ROWS) >= {row_of(span.lane) for span in simulated().spans}
    assert (text_colour("#000000"), text_colour("#ffffff")) == ("#ffffff", "#16191f")
