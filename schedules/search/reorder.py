"""Another compute order for ranks that keep their stages, and so their state, at costs that have been measured."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pentad.schedules.ir.lookup import IS_REDUCTION
from pentad.schedules.ir.program import Program
from pentad.schedules.search.auto import EFFORT, Placement, choose
from pentad.schedules.search.problem import Objective
from pentad.schedules.simulate.costs import Costs
from pentad.schedules.spec.schedule_spec import ScheduleOptions


def reorder(
    program: Program, costs: Costs, options: ScheduleOptions, objective: Objective = "makespan", effort: int = EFFORT
) -> Program:
    """The best compute order found for the ranks of a lowered program, each with the stages that it has. `costs` are by
    unit; a recomputation counts as part of the B that it precedes. Raises PentadError if no order is within the
    limit."""
    placement = stage_placement(program)
    if costs.recompute:
        backward = tuple(sum(each) for each in zip(costs.backward, costs.recompute, strict=True))
        costs = replace(costs, backward=backward, recompute=())
    at = costs.of_stages(program.units)
    sizes = program.ranks, program.microbatches
    return choose(*sizes, lambda _: at, options, objective, effort, placement=placement).best.program


def stage_placement(program: Program) -> Placement:
    """The pipeline stages of every rank, in the order of its chunks."""
    return tuple(tuple(dict.fromkeys(program.stage_of[unit] for unit in held)) for held in program.placement)


def adds_alike(one: Program, other: Program) -> bool:
    """Whether two proven programs add up the same gradients in the same order, and so train to the same bits.

    Every proven program accumulates the gradients of a stage in microbatch order. What else matters is where a stage
    is, the units and slices that it is cut into, which of its holders computes a microbatch, and after which
    microbatches holders reduce.
    """
    return _sums(one) == _sums(other) and one.compute_rank == other.compute_rank


def _sums(program: Program) -> Any:
    columns = program.columns
    reductions = {(int(columns.rank[row]), columns.key(row)) for row in columns.rows_of(IS_REDUCTION)}
    return program.placement, program.units, program.slices, program.microbatches, reductions
