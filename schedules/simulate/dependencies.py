"""Data dependencies between compute instructions, and the times of a compute order without queueing transfers."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from pentad.schedules.ir.columns import CODE, Array, op_mask
from pentad.schedules.ir.errors import ScheduleError
from pentad.schedules.ir.instruction import Instruction, Key, Op
from pentad.schedules.ir.lookup import IS_BACKWARD, IS_FORWARD
from pentad.schedules.ir.program import Program
from pentad.schedules.simulate.costs import Costs, hops, instruction_seconds
from pentad.schedules.simulate.toposort import Graph, earliest_times, topological_levels


def inputs_of(part: Instruction, program: Program, backward: dict[tuple[int, int], Op]) -> tuple[Key, ...]:
    """Keys of the compute instructions whose results `part` reads, on whichever rank they run.

    `backward` is that of `backward_ops`. With sliced sequences a forward also reads the keys and values of the slice
    before it, and a backward the gradients of the slice after it (Seq1F1B, arXiv 2406.03488).
    """
    stage, mb, slices = part.stage, part.microbatch, program.slices
    match part.op:
        case Op.F:
            earlier = (Key(Op.F, stage - 1, mb),) if stage > 0 else ()
            return (*earlier, Key(Op.F, stage, mb - 1)) if mb % slices else earlier
        case Op.B | Op.BW:
            later = [(stage + 1, mb)] * (stage + 1 < program.stages) + [(stage, mb + 1)] * ((mb + 1) % slices > 0)
            return (Key(Op.F, stage, mb), *(Key(backward.get(one, Op.B), *one) for one in later))
        case Op.W:
            return (Key(Op.B, stage, mb),)
        case _:
            return ()


def backward_ops(program: Program) -> dict[tuple[int, int], Op]:
    """(stage, microbatch) -> B or BW."""
    columns = program.columns
    keys = map(columns.key, columns.rows_of(IS_BACKWARD).tolist())
    return {(key.stage, key.microbatch): key.op for key in keys}


def data_dependencies(program: Program) -> tuple[Array, Array]:
    """`inputs_of` every row as (readers, producers), rows of the program; -1 for a producer that does not exist."""
    columns, rows, step = program.columns, program.lookup, program.total_slices
    f, b, w = map(rows.valid_rows, (IS_FORWARD, IS_BACKWARD, op_mask({Op.W})))
    later_slice, earlier_slice = (
        f[columns.microbatch[f] % program.slices > 0],
        b[(columns.microbatch[b] + 1) % program.slices > 0],
    )
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


def unit_times(program: Program, costs: Costs) -> tuple[Array, Array]:
    """(start, end) of every unit of a compute-only program. Ranks keep their order, transfers never queue.

    Raises ScheduleError where a rank waits for something that never runs.
    """
    columns = program.columns
    units = len(columns.unit_row)
    reader, producer = data_dependencies(program)
    # The order of a rank already covers what it reads from its own earlier units.
    ordered = (columns.rank[producer] == columns.rank[reader]) & (columns.unit[producer] < columns.unit[reader])
    unordered = (producer < 0) | ~ordered
    reader, producer = columns.unit[reader[unordered]], producer[unordered]
    exists = producer >= 0
    source, target = columns.rank[producer[exists]], columns.rank[columns.unit_row[reader[exists]]]
    follows = np.ones(units + 1, bool)
    follows[columns.unit_offsets] = False
    followers = np.flatnonzero(follows)
    # A reader whose producer does not exist waits for itself.
    earlier = np.concatenate((followers - 1, columns.unit[producer[exists]], reader[~exists]))
    later = np.concatenate((followers, reader[exists], reader[~exists]))
    delay = np.concatenate((np.zeros(len(followers)), hops(costs, source, target), np.zeros(np.count_nonzero(~exists))))
    graph = Graph(units, earlier, later, program.ranks, delay)
    levels = topological_levels(graph)
    if len(levels.order) < units:
        raise _stuck(program, levels.order)
    seconds = instruction_seconds(program, costs)
    duration = seconds[columns.unit_row]
    pairs = np.flatnonzero(columns.is_second)
    duration[columns.unit[pairs]] += seconds[pairs]
    return earliest_times(graph, levels, duration, np.zeros(units))


def compute_times(program: Program, costs: Costs) -> list[list[tuple[float, float]]]:
    """`unit_times` by rank."""
    spans = list(zip(*(part.tolist() for part in unit_times(program, costs)), strict=True))
    first = program.columns.unit_offsets.tolist()
    return [spans[a:b] for a, b in pairwise(first)]


def _stuck(program: Program, done: Array) -> ScheduleError:
    """Names the first unit that never runs and what it waits for."""
    columns, backward = program.columns, backward_ops(program)
    ended = np.zeros(len(columns.unit_row), bool)
    ended[done] = True
    rank, at = columns.position(columns.unit_row[np.flatnonzero(~ended)[0]])
    unit = program.streams[rank][at]
    unit_of = {columns.key(row): columns.unit[row] for row in range(columns.rows)}
    inputs = (key for part in unit.parts for key in inputs_of(part, program, backward))
    missing = next(key for key in inputs if key not in unit_of or not ended[unit_of[key]])
    return ScheduleError(f"rank {rank}: {unit} waits for {missing}, which never runs before it", rank, at)
