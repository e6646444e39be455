"""The part of the proof that needs no transfers: placement, every instruction's fields, completeness, accumulation."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from pentad.schedules.ir.columns import CODE, OPS, Array
from pentad.schedules.ir.errors import ScheduleError
from pentad.schedules.ir.instruction import COLLECTIVES, OF_ALL_RANKS, RECEIVES, REDUCTIONS, SENDS, Instruction, Key, Op
from pentad.schedules.ir.lookup import IS_COMPUTE, IS_WEIGHT
from pentad.schedules.ir.program import Program
from pentad.schedules.simulate.events import consecutive

RANK_OPS = OF_ALL_RANKS | {Op.STEP, Op.VALIDATE, Op.ROLLBACK}  # once per rank, without a stage
_BIT = np.array([{Op.F: 1, Op.B: 2, Op.W: 4, Op.BW: 8}.get(op, 0) for op in Op])
_SECOND_HALF = np.array([op in (Op.B, Op.BW) for op in Op])


def error_at(program: Program, row: int, text: str) -> ScheduleError:
    """A ScheduleError whose culprit is a row of the program."""
    rank, index = program.columns.position(row)
    return ScheduleError(f"rank {rank}: {text}", rank, index)


def refuse(program: Program, rows: Array, wrong: Array, text: Callable[[int], str]) -> None:
    """Raises ScheduleError if any of these rows is wrong. The culprit is the first such row of the program, `rows[k]`,
    and `text(k)` says why."""
    found = np.flatnonzero(wrong)
    if len(found):
        k = found[np.argmin(rows[found])]
        raise error_at(program, rows[k], text(k))


def prove_order(program: Program) -> None:
    _prove_placement(program)
    _prove_unique(program)
    _prove_fields(program)
    _prove_computed_once(program)
    _prove_accumulation(program)
    _prove_complete(program)


def _prove_placement(program: Program) -> None:
    held = {stage for stages in program.placement for stage in stages}
    complete = held == set(range(len(held))) and bool(held) and all(program.placement)
    if not complete or len(program.placement) != program.ranks:
        text = f"placement is {program.placement}"
        raise ScheduleError(f"{text}: expected every stage from 0 on {program.ranks} ranks, at least one on each")
    for name in ("microbatches", "chunks", "slices"):
        if (number := getattr(program, name)) < 1:
            raise ScheduleError(f"{name} is {number}: expected at least 1")


def _prove_unique(program: Program) -> None:
    columns, lookup = program.columns, program.lookup
    first, rows = lookup.table[lookup.ids], np.arange(columns.rows)
    refuse(program, rows, (first >= 0) & (first != rows), lambda row: f"{columns.key(row)} runs twice")


def _prove_fields(program: Program) -> None:
    """Checks one row for all rows of a rank that differ in nothing but their microbatch."""
    columns, ids = program.columns, program.lookup.ids
    second = np.flatnonzero(columns.is_second)
    unpaired = (columns.op[second - 1] != CODE[Op.F]) | ~_SECOND_HALF[columns.op[second]]

    def text(k: int) -> str:
        rank, at = columns.position(second[k])
        return f"{program.streams[rank][at]} is no pair of a forward and a backward"

    refuse(program, second, unpaired, text)
    numbers = program.lookup.numbers + 1
    kind = ids // numbers * 2 + (columns.microbatch == -1)
    unknown = program.lookup.table.size - 1
    representative = np.empty(2 * (unknown // numbers + 1), int)
    representative[kind] = np.arange(columns.rows)
    alike = representative[kind]
    same = (ids < unknown) & (columns.peer == columns.peer[alike]) & (columns.group == columns.group[alike])
    rows = np.flatnonzero(~same | (alike == np.arange(columns.rows)))
    fields = (columns.rank, columns.op, columns.stage, columns.microbatch, columns.peer, columns.group)
    values = zip(*(field[rows].tolist() for field in fields), strict=True)
    for row, (rank, op, stage, mb, peer, group) in zip(rows.tolist(), values, strict=True):
        part = Instruction(OPS[op], stage, mb, peer, columns.groups[group])
        if fault := _fault(program, rank, part):
            raise error_at(program, row, f"{part.key} cannot run: {fault}")


def _fault(program: Program, rank: int, part: Instruction) -> str:
    """What is wrong with an instruction's fields; empty if nothing is."""
    if part.op in RANK_OPS:
        if (part.stage, part.microbatch) != (-1, -1):
            return f"{part.op} has no stage and no microbatch"
    elif part.stage not in program.placement[rank]:
        return f"the rank holds stages {program.placement[rank]}"
    elif part.op in (Op.ALL_GATHER, Op.FREE):
        if part.microbatch < 0:
            return "it has no number"
    elif part.op in REDUCTIONS:
        if not -1 <= part.microbatch < (program.microbatches if part.op is Op.REDUCE_SCATTER else 0):
            return "gradients are reduced once a step, or with ZeRO once a microbatch"
    elif not 0 <= part.microbatch < program.total_slices:
        slices = f" of {program.slices} slices" if program.slices > 1 else ""
        return f"there are {program.microbatches} microbatches{slices}"
    if part.op is Op.NORM and part.group == "":  # with post-validation, norms are sent from rank to rank
        return "" if part.peer == rank - 1 else f"its peer is {part.peer}: expected {rank - 1}"
    if part.op is Op.VALIDATE and part.peer != program.ranks - 1:
        return f"its peer is {part.peer}: expected {program.ranks - 1}"
    transfer = part.op in SENDS or part.op in RECEIVES
    if transfer and (part.peer == rank or not 0 <= part.peer < program.ranks):
        return f"its peer is {part.peer}: expected another of the {program.ranks} ranks"
    group = "" if part.op not in COLLECTIVES else "pp" if part.op in OF_ALL_RANKS else f"stage{part.stage}"
    return "" if part.group == group else f"its group is {part.group!r}: expected {group!r}"


def _prove_computed_once(program: Program) -> None:
    columns, compute = program.columns, program.columns.rows_of(IS_COMPUTE)
    cells = program.stages * program.total_slices
    name = _BIT[columns.op[compute]] * cells + program.lookup.cell(compute)
    first = np.empty(9 * cells, int)
    first[name[::-1]] = compute[::-1]
    key, other = columns.key, first[name]
    refuse(program, compute, other != compute, lambda k: f"{key(compute[k])} runs on rank {columns.rank[other[k]]} too")


def _prove_accumulation(program: Program) -> None:
    """Weight gradients of a stage accumulate microbatch by microbatch, the slices of each from the last to the
    first."""
    columns, slices = program.columns, program.slices
    rows = columns.rows_of(IS_WEIGHT)
    before, after = consecutive(rows, columns.rank[rows] * program.stages + columns.stage[rows])
    mb = columns.microbatch
    place = mb + slices - 1 - 2 * (mb % slices)
    order = "microbatch order" + ", the slices of one from the last to the first" * (slices > 1)

    def text(k: int) -> str:
        return f"{columns.key(after[k])} comes after {columns.key(before[k])}, but gradients accumulate in {order}"

    refuse(program, after, place[after] < place[before], text)


def _prove_complete(program: Program) -> None:
    """Every stage runs every microbatch on one rank: as F and BW, as F, B and W, or as F in a forward-only program."""
    columns, lookup, compute = program.columns, program.lookup, program.columns.rows_of(IS_COMPUTE)
    bits = np.bincount(lookup.cell(compute), _BIT[columns.op[compute]], program.stages * program.total_slices)
    complete = bits == 1 if program.forward_only else (bits == 1 + 8) | (bits == 1 + 2 + 4)
    cells = np.flatnonzero(complete & (not program.forward_only))
    f, b, w = (columns.rank[table[cells]] for table in (lookup.forward, lookup.backward, lookup.weight))
    complete[cells] &= (f == b) & (f == w)
    wrong = np.flatnonzero(~complete)
    if len(wrong):
        stage, mb = divmod(int(wrong[0]), program.total_slices)
        found = compute[lookup.cell(compute) == wrong[0]]
        raise _incomplete(program, stage, mb, {columns.key(row).op: columns.position(row) for row in found})


def _incomplete(program: Program, stage: int, mb: int, runs: dict[Op, tuple[int, int]]) -> ScheduleError:
    where = f"stage {stage}, microbatch {mb}"
    if not program.forward_only and set(runs) in ({Op.F, Op.BW}, {Op.F, Op.B, Op.W}):
        rank, index = runs[min(runs)]
        return ScheduleError(f"{where} runs on several ranks: {runs}", rank, index)
    rank, index = next(iter(runs.values()), (program.holders(stage)[0], -1))
    f, b, w, bw = (Key(op, stage, mb) for op in (Op.F, Op.B, Op.W, Op.BW))
    expected = f"{f} alone" if program.forward_only else f"{f} with {bw} or with {b} and {w}"
    found = ", ".join(str(Key(op, stage, mb)) for op in runs) or "nothing"
    return ScheduleError(f"{where}: found {found}: expected {expected}", rank, index)
