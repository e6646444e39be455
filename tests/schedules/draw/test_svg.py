"""The grid as a figure: valid, complete, small."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from itertools import pairwise

import pytest

from pentad.schedules.compiler import compile_program
from pentad.schedules.draw.svg import svg_grid
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


def test_bars_stay_inside_the_picture_and_apart() -> None:
    text = svg_grid(timeline("1f1b"), title="t")
    root = ElementTree.fromstring(text)
    for group in root.iter(f"{SVG}g"):
        if group.get("class") == "b":
            spans = [(float(r.get("x", 0)), float(r.get("width", 0))) for r in group]
            assert all(a + wide <= b + 0.11 for (a, wide), (b, _) in pairwise(spans))
            assert all(x >= 0 and x + wide <= float(root.get("width", 0)) for x, wide in spans)


def test_numbers_are_microbatches_and_both_bubbles_are_printed() -> None:
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
    ] == [
        ("0", "11"),
        ("11", "11"),
    ]


def test_any_title_is_valid_xml() -> None:
    title = "a </title><script>&\x00\x0b\ud800 ]]> \"'"
    root = ElementTree.fromstring(svg_grid(timeline("1f1b"), title=title))
    assert root.findtext(f"{SVG}title") == "a </title><script>& ]]> \"'"


def test_an_unknown_op_is_drawn_and_names_no_class() -> None:
    strange = Span(0, 0, "compute", "x", '"/><b>', 0, 1, -1, 0.0, 1.0)
    text = svg_grid(Timeline("measured", (*timeline("1f1b").spans, strange)), title="t")
    assert [rect.get("class") for rect in bars(text)].count("other") == 1


def test_the_file_is_small_and_has_no_style_a_bar() -> None:
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
def test_only_one_step_with_compute_makes_a_figure(spans: tuple[Span, ...]) -> None:
    with pytest.raises(PentadError, match="one step"):
        svg_grid(Timeline("simulated", spans), title="t")
