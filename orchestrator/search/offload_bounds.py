"""The times of a compute order whose activations go to the host and come back, without compiling it."""

from __future__ import annotations

import numpy as np

from pentad.schedules.ir.columns import CODE, Array
from pentad.schedules.ir.instruction import Op
from pentad.schedules.ir.program import Program
from pentad.schedules.passes.offload import RoundTrips
from pentad.schedules.simulate.costs import Costs
from pentad.schedules.simulate.dependencies import action_seconds, compute_graph
from pentad.schedules.simulate.toposort import Graph, earliest_times, topological_levels


def times_beside_copies(program: Program, costs: Costs, trips: RoundTrips) -> tuple[Array, float]:
    """The start of every action, and the last end of all. A rank copies to the host on one lane and back on another, in
    the order of forwards and of backwards. What takes over an activation's memory waits for its copy; this is ready to
    come back once the compute before `reload` has ended."""
    columns, graph, count = program.columns, compute_graph(program, costs), len(trips.forward)
    seconds, copies = action_seconds(program, costs), np.array(costs.offload)[columns.stage[trips.forward]]
    leave = graph.events + np.arange(count)
    back, rank = leave + count, columns.rank[trips.forward]
    forward, backward = columns.action[trips.forward], columns.action[trips.backward]
    before = trips.reload - 1
    before -= columns.op[columns.action_row[before]] == CODE[Op.RECOMPUTE]  # that of the backward at `reload`
    edges = [
        (forward, leave),
        (leave, trips.release),
        (leave, back),
        (before, back),
        (back, backward),
        _in_turn(leave, rank, forward),
        _in_turn(back, rank, backward),
    ]
    source, target = (np.concatenate(ends) for ends in zip((graph.source, graph.target), *edges, strict=True))
    assert graph.delay is not None
    delay = np.concatenate((graph.delay, np.zeros(len(source) - len(graph.source))))
    both = Graph(graph.events + 2 * count, source, target, 3 * graph.width, delay)  # a rank has three lanes
    seconds = np.concatenate((seconds, copies, copies))
    starts, ends = earliest_times(both, topological_levels(both), seconds, np.zeros(both.events))
    return starts[: graph.events], float(ends.max())


def _in_turn(copies: Array, rank: Array, at: Array) -> tuple[Array, Array]:
    """Consecutive copies of a rank."""
    order = np.argsort(at)
    same = np.diff(rank[order]) == 0
    return copies[order][:-1][same], copies[order][1:][same]
