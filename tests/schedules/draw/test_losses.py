"""Figures of losses: every value at its place on the axes, labels apart, any name."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from itertools import pairwise

import pytest

from pentad.schedules.draw.losses import Evaluation, LossCurve, Window, svg_losses
from pentad.schedules.ir.errors import PentadError

SVG = "{http://www.w3.org/2000/svg}"
HELD_OUT = (Evaluation(0, 8.0), Evaluation(10, 6.5), Evaluation(20, 5.25))


def windows(losses: list[float | None], tokens: int = 30) -> tuple[Window, ...]:
    return tuple(Window(5 * n, 5 * n + 5, loss, 0 if loss is None else tokens) for n, loss in enumerate(losses))


def drawn(text: str, name: str) -> list[list[tuple[float, float]]]:
    """The points of all SVG paths of a class, in pixels: one list per M command."""
    paths = [e.get("d", "") for e in ElementTree.fromstring(text).iter(f"{SVG}path") if e.get("class") == name]
    parts = [part for path in paths for part in re.findall(r"M([^M]*)", path)]
    return [[(float(x), float(y)) for x, y in (point.split() for point in part.split("L"))] for part in parts]


def numbers(text: str, name: str) -> dict[float, float]:
    """Tick label, as a number -> its position: y of losses, x of steps."""
    ticks = [e for e in ElementTree.fromstring(text).iter(f"{SVG}text") if e.get("class") == f"soft {name}"]
    axis = "y" if name == "end" else "x"
    return {float((e.text or "").replace(",", "")): float(e.get(axis, 0)) for e in ticks if e.text != "optimizer steps"}


def place(ticks: dict[float, float], value: float) -> float:
    (low, at_low), *_, (high, at_high) = sorted(ticks.items())
    return at_low + (at_high - at_low) * (value - low) / (high - low)


@pytest.mark.parametrize("scale", [1.0, 1e-3, 40.0])
def test_losses_are_where_the_axes_say(scale: float) -> None:
    held_out = tuple(Evaluation(step, scale * loss) for step, loss in HELD_OUT)
    training = windows([scale * loss for loss in (7.5, 7.0, 6.0, 5.5)])
    text = svg_losses([LossCurve("essays", training, held_out)], title="t")
    losses, steps = numbers(text, "end"), numbers(text, "middle")
    middles = [(window.middle, window.loss or 0.0) for window in training]
    for name, points in (("held s0", held_out), ("train s0", middles)):
        (found,) = drawn(text, name)
        for (x, y), (step, loss) in zip(found, points, strict=True):
            assert x == pytest.approx(place(steps, step), abs=0.11)
            assert y == pytest.approx(place(losses, loss) - 4, abs=0.11)
    assert min(losses) <= 5.25 * scale and 8.0 * scale <= max(losses) and 3 <= len(losses) <= 8


def test_a_window_without_tokens_is_a_gap() -> None:
    text = svg_losses([LossCurve("a", windows([7.0, 6.0, None, 5.0, 4.5]))], title="t")
    assert [len(run) for run in drawn(text, "train s0")] == [2, 2]


@pytest.mark.parametrize("losses", [[5.0, 5.01, 5.02], [4.0, 4.0, 4.0], [7.9, 4.0, 4.01], [8.0, 6.0, 4.0]])
def test_labels_are_apart_inside_the_figure_and_in_the_order_of_the_losses(losses: list[float]) -> None:
    curves = [LossCurve(f"c{n}", held_out=(Evaluation(0, 8.0), Evaluation(9, each))) for n, each in enumerate(losses)]
    root = ElementTree.fromstring(svg_losses(curves, title="t"))
    labels = {
        "".join(e.itertext()): float(e.get("y", 0))
        for e in root.iter(f"{SVG}text")
        if e.find(f"{SVG}tspan") is not None
    }
    assert sorted(labels) == [f"c{number} {loss:.2f}" for number, loss in enumerate(losses)]
    ordered = sorted(labels.items(), key=lambda item: item[1])
    assert all(after - before >= 17.9 for (_, before), (_, after) in pairwise(ordered))
    values = [float(label.split()[1]) for label, _ in ordered]
    assert values == sorted(values, reverse=True) and ordered[-1][1] < float(root.get("height", 0)) - 40


def test_the_strip_has_the_shares_of_the_tokens_and_changes_are_marked() -> None:
    curves = [LossCurve("a", windows([7.0, 6.0], 30)), LossCurve("b", windows([7.0, None], 10))]
    text = svg_losses(curves, title="t", changes=[5])
    upper, lower = (
        e.get("d", "") for e in ElementTree.fromstring(text).iter(f"{SVG}path") if e.get("class", "")[:5] == "share"
    )
    top = float(upper.split("V")[1].split("H")[0])
    border = [float(y) - top for y in re.findall(r"V([\d.]+)", upper)[2:]]
    assert border == [40.0, 30.0]  # from right to left: all tokens come from `a`, then three quarters
    assert f"V{top + 30:.1f}" in lower
    (mark,) = (e.get("d", "") for e in ElementTree.fromstring(text).iter(f"{SVG}path") if e.get("class") == "change")
    assert float(mark[1:].split()[0]) == pytest.approx(place(numbers(text, "middle"), 5), abs=0.11)
    assert "the mixture changes" in text and "share of the training tokens" in text
    assert "share of" not in svg_losses(curves, title="t", of_one_run=False)


def test_one_corpus_has_no_strip_and_any_name_is_valid_xml() -> None:
    text = svg_losses([LossCurve("</text>&\x00", windows([7.0, 6.0]))], title="<b>")
    assert "share of" not in text and "held-out" not in text
    assert ElementTree.fromstring(text).findtext(f"{SVG}title") == "<b>"


@pytest.mark.parametrize("curves", [[], [LossCurve("a")], [LossCurve("a", windows([None]))]])
def test_no_loss_is_refused(curves: list[LossCurve]) -> None:
    with pytest.raises(PentadError, match="expected at least one loss"):
        svg_losses(curves, title="t")
