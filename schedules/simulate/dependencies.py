"""What the mathematics of a step demands of the compute order, before any transfer is placed."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from pentad.schedules.ir.columns import CODE, Array, among
from pentad.schedules.ir.instruction import Instruction, Key, Op
from pentad.schedules.ir.lookup import IS_BACKWARD, IS_FORWARD
from pentad.schedules.ir.program import Program
from pentad.schedules.simulate.costs import Costs
from pentad.schedules.simulate.seconds import hops, seconds
from pentad.schedules.simulate.toposort import Graph, levels, times


class ScheduleError(Exception):
    """A program that may not run. `rank` and `index` point at the culprit in its stream; -1 where there is none."""

    def __init__(self, text: str, rank: int = -1, index: int = -1) -> None:
        super().__init__(text)
        self.rank, self.index = rank, index


def inputs_of(part: Instruction, program: Program, backward: dict[tuple[int, int], Op]) -> tuple[Key, ...]:
    """Keys of the compute instructions whose results `part` reads, wherever they run.

    `backward` tells which op (B or BW) each (stage, microbatch) has. Of a sequence in slices, a forward reads the keys
    and values of the slice before it, and a backward their gradients from the slice behind it (arXiv 2406.03488).
    """
    stage, mb, slices = part.stage, part.microbatch, program.slices
    match part.op:
        case Op.F:
            earlier = (Key(Op.F, stage - 1, mb),) if stage > 0 else ()
            return (*earlier, Key(Op.F, stage, mb - 1)) if mb % slices else earlier
        case Op.B | Op.BW:
            nearby = [(stage + 1, mb)] * (stage + 1 < program.stages) + [(stage, mb + 1)] * ((mb + 1) % slices > 0)
            return (Key(Op.F, stage, mb), *(Key(backward.get(one, Op.B), *one) for one in nearby))
        case Op.W:
            return (Key(Op.B, stage, mb),)
        case _:
            return ()


def backward_ops(program: Program) -> dict[tuple[int, int], Op]:
    """(stage, microbatch) -> B or BW."""
    return {
        (part.stage, part.microbatch): part.op
        for stream in program.streams
        for unit in stream
        for part in unit.parts
        if part.op in (Op.B, Op.BW)
    }


def reads(program: Program) -> tuple[Array, Array]:
    """`inputs_of` every row: rows that read, and for each the row that makes what it reads (-1: nothing does)."""
    columns, rows, pieces = program.columns, program.lookup, program.pieces
    f, b, w = map(rows.sound, (IS_FORWARD, IS_BACKWARD, among({Op.W})))
    within, behind = f[columns.microbatch[f] % program.slices > 0], b[(columns.microbatch[b] + 1) % program.slices > 0]
    down, up = f[columns.stage[f] > 0], b[columns.stage[b] + 1 < program.stages]
    whole = rows.backward.copy()  # of W, which needs a backward by itself
    whole[(whole >= 0) & (columns.op[whole] != CODE[Op.B])] = -1
    made = [
        rows.forward[rows.cell(down) - pieces],
        rows.forward[rows.cell(within) - 1],
        rows.forward[rows.cell(b)],
        rows.backward[rows.cell(up) + pieces],
        rows.backward[rows.cell(behind) + 1],
        whole[rows.cell(w)],
    ]
    return np.concatenate((down, within, b, up, behind, w)), np.concatenate(made)


def unit_times(program: Program, costs: Costs) -> tuple[Array, Array]:
    """(start, end) of every unit of a compute-only program, each rank in its own order, transfers never queueing.

    Raises ScheduleError where a rank waits for something that never comes.
    """
    columns = program.columns
    count = len(columns.unit_row)
    reader, made = reads(program)
    # What a rank has from earlier units of its own is there by its order alone.
    away = (made < 0) | (columns.rank[made] != columns.rank[reader]) | (columns.unit[made] >= columns.unit[reader])
    reader, made = columns.unit[reader[away]], made[away]
    known = made >= 0
    source, target = columns.rank[made[known]], columns.rank[columns.unit_row[reader[known]]]
    follows = np.ones(count + 1, bool)
    follows[columns.unit_first] = False
    followers = np.flatnonzero(follows)
    # What nothing makes is an event that waits for itself.
    earlier = np.concatenate((followers - 1, columns.unit[made[known]], reader[~known]))
    later = np.concatenate((followers, reader[known], reader[~known]))
    extra = np.concatenate((np.zeros(len(followers)), hops(costs, source, target), np.zeros(np.count_nonzero(~known))))
    graph = Graph(count, earlier, later, program.ranks, extra)
    walked = levels(graph)
    if len(walked.order) < count:
        raise _stuck(program, walked.order)
    each = seconds(program, costs)
    whole = each[columns.unit_row]
    pairs = np.flatnonzero(columns.second)
    whole[columns.unit[pairs]] += each[pairs]
    return times(graph, walked, whole, np.zeros(count))


def compute_times(program: Program, costs: Costs) -> list[list[tuple[float, float]]]:
    """`unit_times` by rank."""
    spans = list(zip(*(part.tolist() for part in unit_times(program, costs)), strict=True))
    first = program.columns.unit_first.tolist()
    return [spans[a:b] for a, b in pairwise(first)]


def _stuck(program: Program, done: Array) -> ScheduleError:
    columns, backward = program.columns, backward_ops(program)
    ended = np.zeros(len(columns.unit_row), bool)
    ended[done] = True
    rank, at = columns.place(columns.unit_row[np.flatnonzero(~ended)[0]])
    unit = program.streams[rank][at]
    home = {columns.key(row): columns.unit[row] for row in range(columns.rows)}
    keys = (key for part in unit.parts for key in inputs_of(part, program, backward))
    missing = next(key for key in keys if key not in home or not ended[home[key]])
    return ScheduleError(f"rank {rank}: {unit} waits for {missing}, which never runs before it", rank, at)
