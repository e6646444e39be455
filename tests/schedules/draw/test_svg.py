"""Figures: valid, complete, small, legible on light and dark pages."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from itertools import pairwise

import pytest
from paths import ROOT

from pentad.schedules.compiler import compile_program
from pentad.schedules.draw.palette import shades
from pentad.schedules.draw.svg import svg_comparison, svg_grid
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.simulate.costs import Costs
from pentad.schedules.simulate.simulate import simulate
from pentad.schedules.simulate.timeline import COMPUTE, Span, Timeline

SVG = "{http://www.w3.org/2000/svg}"


def timeline(name: str, ranks: int = 4, microbatches: int = 8, unit: float = 1.0) -> Timeline:
    program = compile_program(name, ranks, microbatches)
    return simulate(program, Costs.uniform(program.stages, unit, unit, unit))


def bars(text: str) -> list[ElementTree.Element]:
    return [
        rect for group in ElementTree.fromstring(text).iter(f"{SVG}g") if group.get("class") == "b" for rect in group
    ]


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h2", "dualpipe"])
@pytest.mark.parametrize("unit", [1.0, 3e-6])
def test_every_compute_span_is_one_bar_of_its_op(name: str, unit: float) -> None:
    source = timeline(name, unit=unit)
    found = [rect.get("class", "").split()[0] for rect in bars(svg_grid(source, title=name))]
    assert sorted(op for op in found if op in COMPUTE) == sorted(span.op for span in source.compute)


def test_bars_do_not_overlap_or_leave_the_figure() -> None:
    root = ElementTree.fromstring(svg_grid(timeline("1f1b"), title="t"))
    for group in root.iter(f"{SVG}g"):
        if group.get("class") == "b":
            spans = [(float(r.get("x", 0)), float(r.get("width", 0))) for r in group]
            assert all(a + wide <= b + 0.11 for (a, wide), (b, _) in pairwise(spans))
            assert all(x >= 0 and x + wide <= float(root.get("width", 0)) for x, wide in spans)


def test_numbers_are_microbatches_and_both_bubbles_are_given() -> None:
    source = timeline("1f1b")
    text = svg_grid(source, title="t")
    groups = [group for group in ElementTree.fromstring(text).iter(f"{SVG}g") if group.get("class") == "n"]
    numbers = sorted(int(label.text or "") for group in groups for label in group)
    assert numbers == sorted(span.microbatch for span in source.compute)
    assert f"bubble {source.bubble().makespan:.1%}" in text and f"bubble {source.bubble().longest:.1%}" in text


def test_overlapping_bars_share_the_height_of_their_row() -> None:
    pair = [Span(0, 0, "compute", f"0{op}1", op, 0, 1, -1, 0.0, 1.0) for op in ("F", "B")]
    assert [
        (rect.get("y", "0"), rect.get("height"))
        for rect in bars(svg_grid(Timeline("simulated", tuple(pair)), title="t"))
    ] == [("0", "11"), ("11", "11")]


def test_any_title_is_valid_xml() -> None:
    title = "a </title><script>&\x00\x0b\ud800 ]]> \"'"
    root = ElementTree.fromstring(svg_grid(timeline("1f1b"), title=title))
    assert root.findtext(f"{SVG}title") == "a </title><script>& ]]> \"'"


def test_an_unknown_op_is_drawn_and_names_no_class() -> None:
    strange = Span(0, 0, "compute", "x", '"/><b>', 0, 1, -1, 0.0, 1.0)
    text = svg_grid(Timeline("measured", (*timeline("1f1b").spans, strange)), title="t")
    assert [rect.get("class") for rect in bars(text)].count("other") == 1


def test_the_file_is_small_and_bars_have_no_style_of_their_own() -> None:
    text = svg_grid(timeline("zb-h1", 8, 32), title="t")
    assert len(text) < 130 * 3 * 8 * 32
    assert not re.search(r"<(rect|text)[^>]*style=", text)


@pytest.mark.parametrize(
    "spans",
    [
        (),
        tuple(span._replace(step=span.microbatch) for span in timeline("1f1b").spans),
        tuple(span for span in timeline("1f1b").spans if span.op == "STEP"),
        tuple(span._replace(end=0.0, start=0.0) for span in timeline("1f1b").spans),
    ],
)
def test_anything_but_one_step_with_compute_is_refused(spans: tuple[Span, ...]) -> None:
    with pytest.raises(PentadError, match="one step"):
        svg_grid(Timeline("simulated", spans), title="t")


def measured(source: Timeline, slower: float = 1.3) -> Timeline:
    """The same spans, slower and on another clock."""
    spans = (span._replace(step=7, start=50 + slower * span.start, end=50 + slower * span.end) for span in source.spans)
    return Timeline("measured", tuple(spans))


def panel_bars(text: str, ranks: int) -> list[list[tuple[str, float, float]]]:
    """(op, x, width) of the compute bars of each panel, one row of bars per rank."""
    groups = [group for group in ElementTree.fromstring(text).iter(f"{SVG}g") if group.get("class") == "b"]
    found: list[list[tuple[str, float, float]]] = [[], []]
    for number, group in enumerate(groups):
        for bar in group:
            op = bar.get("class", "").split()[0]
            if op in COMPUTE:
                found[number // ranks].append((op, float(bar.get("x", 0)), float(bar.get("width", 0))))
    return found


@pytest.mark.parametrize("name", ["1f1b", "zb-h2", "zb-v", "dualpipe"])
def test_a_comparison_draws_every_span_once_on_one_time_axis(name: str) -> None:
    simulated = timeline(name, unit=5e-3)
    above, below = panel_bars(svg_comparison(measured(simulated), simulated, title=name), 4)
    for bars_of_panel in (above, below):
        assert sorted(op for op, _, _ in bars_of_panel) == sorted(span.op for span in simulated.compute)
    for (_, long_x, _), (_, x, _) in zip(above, below, strict=True):
        assert long_x == pytest.approx(1.3 * x, abs=0.15)  # x is rounded to 0.1 pixels
    zero = min(span.start for span in simulated.compute)
    starts = sorted(span.start - zero for span in simulated.compute)
    scale = max(x for _, x, _ in below) / starts[-1]
    assert sorted(x for _, x, _ in below) == pytest.approx([scale * start for start in starts], abs=0.15)


def test_a_comparison_names_panels_figures_ranks_and_ops() -> None:
    simulated = timeline("zb-h1", unit=5e-3)
    text = svg_comparison(measured(simulated), simulated, title="quickstart: zb-h1")
    root = ElementTree.fromstring(text)
    texts = ["".join(label.itertext()) for label in root.iter(f"{SVG}text")]
    assert [label for label in texts if label.startswith("rank ")] == [f"rank {rank}" for rank in range(4)] * 2
    for heading, source in (("Measured, step 7", measured(simulated)), ("Simulated at that step's costs", simulated)):
        (found,) = [label for label in texts if label.startswith(heading)]
        bubble = source.bubble()
        assert f"makespan {1e3 * source.makespan:.4g} ms (bubble {bubble.makespan:.1%})" in found
        assert f"longest {1e3 * source.longest:.4g} ms (bubble {bubble.longest:.1%})" in found
    assert {"quickstart: zb-h1", "0 ms", "20 ms", "F forward", "B backward, input", "W backward, weights"} <= set(texts)
    ticks = [label for label in root.iter(f"{SVG}text") if "middle" in label.get("class", "")]
    assert all(float(label.get("x", 0)) + 3 * len(label.text or "") < 900 for label in ticks)
    assert (root.get("width"), root.findtext(f"{SVG}title")) == ("900", "quickstart: zb-h1")
    assert len(text) < 300_000


@pytest.mark.parametrize("name", ["zb-h1", "zb-v"])
def test_a_comparison_has_the_colours_of_the_page_on_light_and_dark(name: str) -> None:
    simulated = timeline(name)
    light, _, dark = svg_comparison(measured(simulated), simulated, title="t").partition("prefers-color-scheme:dark")
    chunks = 2 if name == "zb-v" else 1
    for op in ("F", "B", "W"):
        for css, (first, *others) in ((light, shades(op, "light", chunks)), (dark, shades(op, "dark", chunks))):
            assert f"}}.{op}{{fill:{first}}}" in css
            assert all(f".{op}.c1{{fill:{other}}}" in css for other in others)
    assert ".page{fill:#fff}" in light and ".page{fill:#1a1e25}" in dark


def test_a_comparison_needs_one_step_of_each() -> None:
    simulated = timeline("1f1b")
    two = Timeline("measured", (*measured(simulated).spans, *simulated.spans))
    with pytest.raises(PentadError, match="svg_comparison got a timeline of 2 steps: expected one step"):
        svg_comparison(two, simulated, title="t")


def test_the_picture_in_the_readme_is_a_comparison() -> None:
    text = (ROOT / "docs" / "images" / "quickstart-timeline.svg").read_text()
    above, below = panel_bars(text, 4)
    assert sorted(op for op, _, _ in above) == sorted(op for op, _, _ in below)
    assert len(above) == 4 * 8 * 3  # ranks, microbatches, F B W
    assert "Measured, step" in text and len(text) < 300_000
