"""Data dependencies between compute instructions, and the times of a compute order without queueing transfers."""

from __future__ import annotations

from itertools import pairwise
from weakref import WeakKeyDictionary

import numpy as np

from pentad.schedules.ir.columns import CODE, Array, op_mask
from pentad.schedules.ir.errors import ScheduleError
from pentad.schedules.ir.instruction import Op
from pentad.schedules.ir.lookup import IS_BACKWARD, IS_FORWARD, Lookup
from pentad.schedules.ir.program import Program
from pentad.schedules.simulate.costs import Costs, hops, instruction_seconds
from pentad.schedules.simulate.toposort import Graph, Levels, earliest_times, topological_levels

# Cached by the lookup of a program, as a program is simulated at many costs.
_edges = WeakKeyDictionary[Lookup, tuple[Array, Array, Array, Array]]()
_levels = WeakKeyDictionary[Lookup, Levels]()


def data_dependencies(program: Program) -> tuple[Array, Array]:
    """(readers, producers), rows of compute instructions: row readers[k] reads the result of row producers[k], on
    whichever rank that runs; -1 for a producer that does not exist.

    With sliced sequences a forward also reads the keys and values of the slice before it, and a backward the gradients
    of the slice after it (Seq1F1B, arXiv 2406.03488).
    """
    columns, rows, step = program.columns, program.lookup, program.total_slices
    f, b, w = map(rows.valid_rows, (IS_FORWARD, IS_BACKWARD, op_mask({Op.W})))
    later_slice = f[columns.microbatch[f] % program.slices > 0]
    earlier_slice = b[(columns.microbatch[b] + 1) % program.slices > 0]
    not_first, not_last = f[columns.stage[f] > 0], b[columns.stage[b] + 1 < program.stages]
    input_gradient = rows.backward.copy()  # of W, which reads a B but no BW
    input_gradient[(input_gradient >= 0) & (columns.op[input_gradient] != CODE[Op.B])] = -1
    producers = [
        rows.forward[rows.cell(not_first) - step],
        rows.forward[rows.cell(later_slice) - 1],
        rows.forward[rows.cell(b)],
        rows.backward[rows.cell(not_last) + step],
        rows.backward[rows.cell(earlier_slice) + 1],
        input_gradient[rows.cell(w)],
    ]
    return np.concatenate((not_first, later_slice, b, not_last, earlier_slice, w)), np.concatenate(producers)


def action_times(program: Program, costs: Costs) -> tuple[Array, Array]:
    """(start, end) of every action of a complete compute order. Ranks keep their order, transfers never queue.

    Raises ScheduleError where a rank waits for something that never runs before it.
    """
    graph = compute_graph(program, costs)
    levels = action_levels(program, graph)
    return earliest_times(graph, levels, action_seconds(program, costs), np.zeros(graph.events))


def action_levels(program: Program, graph: Graph) -> Levels:
    """The actions of a compute order by what they wait for; `graph` is its `compute_graph`. Raises ScheduleError as
    `action_times` does."""
    if program.lookup not in _levels:
        _levels[program.lookup] = topological_levels(graph)
    levels = _levels[program.lookup]
    if len(levels.order) < graph.events:
        raise _stuck(program, levels.order)
    return levels


def compute_graph(program: Program, costs: Costs) -> Graph:
    """The actions of a compute order, each after the one before on its rank and, by transfers, after what it reads."""
    if program.lookup not in _edges:
        _edges[program.lookup] = _edges_of(program)
    earlier, later, source, target = _edges[program.lookup]
    followers = len(earlier) - len(source)
    delay = np.concatenate((np.zeros(followers), hops(costs, source, target)))
    return Graph(len(program.columns.action_row), earlier, later, program.ranks, delay)


def _edges_of(program: Program) -> tuple[Array, Array, Array, Array]:
    """The edges of `compute_graph`: earlier and later actions; and, for the last edges, which are transfers, sender and
    receiver."""
    columns = program.columns
    reader, producer = data_dependencies(program)
    source, target, earlier = columns.rank[producer], columns.rank[reader], columns.action[producer]
    # The order of a rank already covers what it reads from its own earlier actions.
    unordered = (source != target) | (earlier >= columns.action[reader])
    follows = np.ones(len(columns.action_row) + 1, bool)
    follows[columns.action_offsets] = False
    followers = np.flatnonzero(follows)
    earlier = np.concatenate((followers - 1, earlier[unordered]))
    later = np.concatenate((followers, columns.action[reader[unordered]]))
    return earlier, later, source[unordered], target[unordered]


def action_seconds(program: Program, costs: Costs) -> Array:
    """Seconds of every action; those of an overlapped pair are summed."""
    columns, seconds = program.columns, instruction_seconds(program, costs)
    found: Array = seconds[columns.action_row]
    pairs = np.flatnonzero(columns.is_second)
    found[columns.action[pairs]] += seconds[pairs]
    return found


def compute_times(program: Program, costs: Costs) -> list[list[tuple[float, float]]]:
    """`action_times` by rank."""
    spans = list(zip(*(part.tolist() for part in action_times(program, costs)), strict=True))
    first = program.columns.action_offsets.tolist()
    return [spans[a:b] for a, b in pairwise(first)]


def _stuck(program: Program, done: Array) -> ScheduleError:
    """Names the first action that never runs and what it waits for."""
    columns, (reader, producer) = program.columns, data_dependencies(program)
    stuck = np.ones(len(columns.action_row), bool)
    stuck[done] = False
    first = np.argmax(stuck)
    missing = producer[(columns.action[reader] == first) & stuck[columns.action[producer]]][0]
    rank, at = columns.position(columns.action_row[first])
    text = f"{program.streams[rank][at]} waits for {columns.key(missing)}, which never runs before it"
    return ScheduleError(f"rank {rank}: {text}", rank, at)
