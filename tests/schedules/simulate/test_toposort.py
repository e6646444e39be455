"""Wide and narrow walks of a graph put every event behind what it waits for, and start it when that has ended."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pentad.schedules.simulate.toposort import WIDE, Graph, levels, times

WIDTHS = pytest.mark.parametrize("width", [1, WIDE], ids=["narrow", "wide"])


@st.composite
def graphs(draw: st.DrawFn) -> tuple[int, list[tuple[int, int, float]]]:
    """Events in a drawn order, and edges (earlier, later, seconds between) along it."""
    count = draw(st.integers(1, 12))
    order = draw(st.permutations(range(count)))
    pair = st.tuples(st.integers(0, count - 1), st.integers(0, count - 1), st.floats(0, 9))
    pairs = [(min(a, b), max(a, b), extra) for a, b, extra in draw(st.lists(pair, max_size=30)) if a != b]
    return count, [(order[a], order[b], extra) for a, b, extra in pairs]


def graph_of(count: int, edges: list[tuple[int, int, float]], width: int) -> Graph:
    earlier, later = (np.array([edge[k] for edge in edges], int) for k in (0, 1))
    return Graph(count, earlier, later, width, np.array([extra for _, _, extra in edges], float))


@WIDTHS
@given(found=graphs(), data=st.data())
def test_every_event_starts_when_the_last_it_waits_for_has_ended(
    width: int, found: tuple[int, list[tuple[int, int, float]]], data: st.DataObject
) -> None:
    count, edges = found
    seconds = st.lists(st.floats(0, 9), min_size=count, max_size=count).map(np.array)
    first, second = data.draw(seconds), data.draw(seconds)
    graph = graph_of(count, edges, width)
    walked = levels(graph)
    assert sorted(walked.order) == list(range(count))
    place = {event: k for k, event in enumerate(walked.order.tolist())}
    assert all(place[earlier] < place[later] for earlier, later, _ in edges)
    starts, ends = times(graph, walked, first, second)
    for event in range(count):
        assert starts[event] == max((ends[a] + extra for a, b, extra in edges if b == event), default=0.0)
        assert ends[event] == starts[event] + first[event] + second[event]
    without = times(graph._replace(extra=None), walked, first, second)[0]
    assert all(without[b] >= without[a] + first[a] for a, b, _ in edges)


@WIDTHS
@given(found=graphs(), data=st.data())
def test_what_waits_for_itself_is_in_no_order(
    width: int, found: tuple[int, list[tuple[int, int, float]]], data: st.DataObject
) -> None:
    count, edges = found
    event = data.draw(st.integers(0, count - 1))
    stuck = {event}
    while more := {b for a, b, _ in edges if a in stuck} - stuck:
        stuck |= more
    walked = levels(graph_of(count, [*edges, (event, event, 0.0)], width))
    assert sorted(walked.order) == sorted(set(range(count)) - stuck)
