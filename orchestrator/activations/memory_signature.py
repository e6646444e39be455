"""Which pipeline ranks need the same memory because they run the same instructions on units of the same sizes."""

from __future__ import annotations

from collections.abc import Hashable, Iterator

import numpy as np

from pentad.orchestrator.activations.allocations import Piece, piece_of, traits_of
from pentad.schedules.ir.columns import Array
from pentad.schedules.ir.program import Program
from pentad.schedules.spec.plan import Plan


def signature_of(plan: Plan, pp: int) -> Hashable:
    """What the memory of a pipeline rank depends on, except for Muon, whose matrices differ by rank."""
    units, piece = plan.program.placement[pp], piece_of(plan)
    return (*(_unit(plan, unit, piece) for unit in units), *(each for of in plan.programs for each in _rows(of, pp)))


def _unit(plan: Plan, unit: int, piece: Piece) -> Hashable:
    model, held, stage_of = plan.model, plan.layers[unit], plan.program.stage_of
    return (
        held if model.custom is not None else (*traits_of(model, held, piece), held.has_embedding, held.has_head),
        (unit == 0, unit == len(stage_of) - 1, stage_of[unit - 1] != stage_of[unit]),
        (plan.recompute_mode(unit), plan.offload[unit] if plan.offload else None),
        plan.program.sizes[unit] if plan.program.sizes else None,
    )


def _rows(program: Program, pp: int) -> Iterator[bytes]:
    """The instructions of a rank, with stages counted from its first one."""
    columns, base = program.columns, program.placement[pp][0]
    rows = slice(*columns.rank_offsets[pp : pp + 2].tolist())
    waits = slice(*columns.wait_offsets[[rows.start, rows.stop]].tolist())

    def from_first(stage: Array) -> Array:
        return np.where(stage < 0, len(program.stage_of), stage - base)

    yield from_first(columns.stage[rows]).tobytes()
    yield from (each[rows].tobytes() for each in (columns.op, columns.microbatch, columns.slot, columns.is_second))
    yield np.diff(columns.wait_offsets[rows.start : rows.stop + 1]).tobytes()
    yield from_first(columns.wait_stage[waits]).tobytes()
    yield from (each[waits].tobytes() for each in (columns.wait_op, columns.wait_microbatch))
