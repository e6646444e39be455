"""The part of a program's proof that needs no transfers: its placement, each instruction by itself, completeness."""

from __future__ import annotations

import numpy as np

from pentad.schedules.ir.columns import CODE, OPS, Array
from pentad.schedules.ir.instruction import COLLECTIVES, RECEIVES, REDUCTIONS, SENDS, Instruction, Key, Op
from pentad.schedules.ir.lookup import IS_COMPUTE, IS_WEIGHT
from pentad.schedules.ir.program import Program
from pentad.schedules.simulate.dependencies import ScheduleError

WHOLE = frozenset({Op.NORM, Op.STEP, Op.VALIDATE, Op.ROLLBACK})  # of a rank, not of a stage
_BIT = np.array([{Op.F: 1, Op.B: 2, Op.W: 4, Op.BW: 8}.get(op, 0) for op in Op])
_PAIRED = np.array([op in (Op.B, Op.BW) for op in Op])


def prove_order(program: Program) -> None:
    _prove_placement(program)
    _prove_unique(program)
    _prove_form(program)
    _prove_single(program)
    _prove_accumulation(program)
    _prove_complete(program)


def _prove_placement(program: Program) -> None:
    held = {stage for stages in program.placement for stage in stages}
    whole = held == set(range(len(held))) and bool(held) and all(program.placement)
    if not whole or len(program.placement) != program.ranks:
        text = f"placement {program.placement} does not spread every stage from 0 over {program.ranks} ranks"
        raise ScheduleError(text)
    for name in ("microbatches", "chunks", "slices"):
        if (number := getattr(program, name)) < 1:
            raise ScheduleError(f"there are {number} {name}, but at least 1 is needed")


def _prove_unique(program: Program) -> None:
    columns, rows = program.columns, program.lookup
    first = rows.table[rows.ids]
    again = np.flatnonzero((first >= 0) & (first != np.arange(columns.rows)))
    if len(again):
        rank, at = columns.place(again[0])
        raise ScheduleError(f"rank {rank} runs {columns.key(again[0])} twice", rank, at)


def _prove_form(program: Program) -> None:
    """One row stands for all that differ in nothing but a microbatch that there is."""
    columns, ids = program.columns, program.lookup.ids
    second = np.flatnonzero(columns.second)
    wrong = second[(columns.op[second - 1] != CODE[Op.F]) | ~_PAIRED[columns.op[second]]]
    if len(wrong):
        rank, at = columns.place(wrong[0])
        text = f"rank {rank}: {program.streams[rank][at]} is no pair of a forward and a backward"
        raise ScheduleError(text, rank, at)
    numbers = program.lookup.numbers + 1
    kind = ids // numbers * 2 + (columns.microbatch == -1)
    unknown = program.lookup.table.size - 1
    first = np.empty(2 * (unknown // numbers + 1), int)
    first[kind] = np.arange(columns.rows)
    alike = first[kind]
    same = (ids < unknown) & (columns.peer == columns.peer[alike]) & (columns.group == columns.group[alike])
    rows = np.flatnonzero(~same | (alike == np.arange(columns.rows)))
    fields = (columns.rank, columns.op, columns.stage, columns.microbatch, columns.peer, columns.group)
    told = zip(*(field[rows].tolist() for field in fields), strict=True)
    for row, (rank, op, stage, mb, peer, group) in zip(rows.tolist(), told, strict=True):
        part = Instruction(OPS[op], stage, mb, peer, columns.groups[group])
        fault = _fault(program, rank, part)
        if fault:
            raise ScheduleError(f"rank {rank} runs {part.key}, but {fault}", *columns.place(row))


def _fault(program: Program, rank: int, part: Instruction) -> str:
    """What is wrong with the fields of an instruction by themselves; empty if nothing is."""
    if part.op in WHOLE:
        if (part.stage, part.microbatch) != (-1, -1):
            return f"{part.op} has no stage and no microbatch"
    elif part.stage not in program.placement[rank]:
        return f"holds stages {program.placement[rank]}"
    elif part.op in (Op.ALL_GATHER, Op.FREE):
        if part.microbatch < 0:
            return "it has no number"
    elif part.op in REDUCTIONS and part.microbatch < -1:
        return "there is no such bucket"
    elif part.op not in REDUCTIONS and not 0 <= part.microbatch < program.pieces:
        pieces = f" of {program.slices} slices" if program.slices > 1 else ""
        return f"there are {program.microbatches} microbatches{pieces}"
    if part.op is Op.NORM and part.group == "":  # of a step that is validated later
        return "" if part.peer == rank - 1 else f"its peer is {part.peer}: expected {rank - 1}"
    if part.op is Op.VALIDATE and part.peer != program.ranks - 1:
        return f"its peer is {part.peer}: expected {program.ranks - 1}"
    moves = part.op in SENDS or part.op in RECEIVES
    if moves and (part.peer == rank or not 0 <= part.peer < program.ranks):
        return f"its peer is {part.peer}: expected another of the {program.ranks} ranks"
    group = "" if part.op not in COLLECTIVES else "pp" if part.op is Op.NORM else f"stage{part.stage}"
    if part.group != group:
        return f"its group is {part.group!r}: expected {group!r}"
    return ""


def _prove_single(program: Program) -> None:
    columns, compute = program.columns, _compute(program)
    kind = _BIT[columns.op[compute]] * program.stages * program.pieces + program.lookup.cell(compute)
    first = np.empty(9 * program.stages * program.pieces, int)
    first[kind[::-1]] = compute[::-1]
    again = np.flatnonzero(first[kind] != compute)
    if len(again):
        row, other = compute[again[0]], first[kind][again[0]]
        rank, at = columns.place(row)
        raise ScheduleError(f"rank {rank} runs {columns.key(row)}, and so does rank {columns.rank[other]}", rank, at)


def accumulation(microbatch: Array, slices: int) -> Array:
    """Place of a piece in the sum of gradients: microbatch by microbatch, its slices from the last to the first."""
    return microbatch + slices - 1 - 2 * (microbatch % slices)


def _prove_accumulation(program: Program) -> None:
    columns = program.columns
    rows = columns.rows_of(IS_WEIGHT)
    holding = columns.rank[rows] * program.stages + columns.stage[rows]
    by_holding = np.argsort(holding, kind="stable")
    rows, holding = rows[by_holding], holding[by_holding]
    place = accumulation(columns.microbatch[rows], program.slices)
    late = np.flatnonzero((np.diff(holding) == 0) & (np.diff(place) < 0))
    if len(late):
        before, row = min(zip(rows[late].tolist(), rows[late + 1].tolist(), strict=True), key=lambda pair: pair[1])
        order = "microbatch order" + ", the slices of one from the last to the first" * (program.slices > 1)
        text = f"{columns.key(row)} comes after {columns.key(before)}, but gradients accumulate in {order}"
        rank, at = columns.place(row)
        raise ScheduleError(f"rank {rank}: {text}", rank, at)


def _prove_complete(program: Program) -> None:
    columns, rows, compute = program.columns, program.lookup, _compute(program)
    cells = program.stages * program.pieces
    bits = np.bincount(rows.cell(compute), _BIT[columns.op[compute]], cells).astype(int)
    whole = (bits == 1 + 8) | (bits == 1 + 2 + 4)
    there = np.flatnonzero(whole)
    f, b, w = (columns.rank[table[there]] for table in (rows.forward, rows.backward, rows.weight))
    whole[there] &= (f == b) & (f == w)
    wrong = np.flatnonzero(~whole)
    if len(wrong):
        stage, mb = divmod(int(wrong[0]), program.pieces)
        found = compute[rows.cell(compute) == wrong[0]]
        raise _incomplete(program, stage, mb, {columns.key(row).op: columns.place(row) for row in found})


def _incomplete(program: Program, stage: int, mb: int, runs: dict[Op, tuple[int, int]]) -> ScheduleError:
    kinds = sorted(runs)
    if kinds not in (sorted([Op.F, Op.BW]), sorted([Op.F, Op.B, Op.W])):
        rank, index = next(iter(runs.values()), (program.holders(stage)[0], -1))
        f, b, w, bw = (Key(op, stage, mb) for op in (Op.F, Op.B, Op.W, Op.BW))
        have = ", ".join(str(Key(op, stage, mb)) for op in runs) or "nothing"
        want = f"{f} with {bw} or with {b} and {w}"
        return ScheduleError(f"stage {stage}, microbatch {mb}: found {have}: expected {want}", rank, index)
    rank, index = runs[kinds[0]]
    return ScheduleError(f"stage {stage}, microbatch {mb} runs on several ranks: {runs}", rank, index)


def _compute(program: Program) -> Array:
    return program.columns.rows_of(IS_COMPUTE)
