"""Both algorithms order every event after its predecessors and start it when the last of them has ended."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pentad.schedules.simulate.toposort import WIDE, Graph, earliest_times, topological_levels

WIDTHS = pytest.mark.parametrize("width", [1, WIDE], ids=["narrow", "wide"])


@st.composite
def graphs(draw: st.DrawFn) -> tuple[int, list[tuple[int, int, float]]]:
    """A number of events, and edges (source, target, delay) that follow a random order of the events."""
    count = draw(st.integers(1, 12))
    order = draw(st.permutations(range(count)))
    pair = st.tuples(st.integers(0, count - 1), st.integers(0, count - 1), st.floats(0, 9))
    pairs = [(min(a, b), max(a, b), delay) for a, b, delay in draw(st.lists(pair, max_size=30)) if a != b]
    return count, [(order[a], order[b], delay) for a, b, delay in pairs]


def graph_of(count: int, edges: list[tuple[int, int, float]], width: int) -> Graph:
    source, target = (np.array([edge[k] for edge in edges], int) for k in (0, 1))
    return Graph(count, source, target, width, np.array([delay for _, _, delay in edges], float))


@WIDTHS
@given(drawn=graphs(), data=st.data())
def test_every_event_starts_when_its_last_predecessor_has_ended(
    width: int, drawn: tuple[int, list[tuple[int, int, float]]], data: st.DataObject
) -> None:
    count, edges = drawn
    seconds = st.lists(st.floats(0, 9), min_size=count, max_size=count).map(np.array)
    first, second = data.draw(seconds), data.draw(seconds)
    graph = graph_of(count, edges, width)
    levels = topological_levels(graph)
    assert sorted(levels.order) == list(range(count))
    place = {event: k for k, event in enumerate(levels.order.tolist())}
    assert all(place[source] < place[target] for source, target, _ in edges)
    starts, ends = earliest_times(graph, levels, first, second)
    for event in range(count):
        assert starts[event] == max((ends[a] + delay for a, b, delay in edges if b == event), default=0.0)
        assert ends[event] == starts[event] + first[event] + second[event]
    without = earliest_times(graph._replace(delay=None), levels, first, second)[0]
    assert all(without[b] >= without[a] + first[a] for a, b, _ in edges)


@WIDTHS
@given(drawn=graphs(), data=st.data())
def test_events_on_or_after_a_cycle_are_in_no_order(
    width: int, drawn: tuple[int, list[tuple[int, int, float]]], data: st.DataObject
) -> None:
    count, edges = drawn
    event = data.draw(st.integers(0, count - 1))
    stuck = {event}
    while more := {b for a, b, _ in edges if a in stuck} - stuck:
        stuck |= more
    levels = topological_levels(graph_of(count, [*edges, (event, event, 0.0)], width))
    assert sorted(levels.order) == sorted(set(range(count)) - stuck)
