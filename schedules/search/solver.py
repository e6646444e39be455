"""Proven optima of small steps by constraint programming (OR-Tools CP-SAT): what schedules and searches are held to.

Microbatches keep their order within each kind and stage, B and W are apart, and each stage is on one rank.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from math import gcd
from typing import Any, NamedTuple

from pentad.schedules.ir.errors import PentadError
from pentad.schedules.ir.instruction import Unit
from pentad.schedules.search.search_problem import UNITS, By, Orders, Problem, orders_of, room_of, streams_of, timed
from pentad.schedules.simulate.costs import Costs


class Optimum(NamedTuple):
    """The best streams found and their time in the unit of the costs; `proven` if none is quicker, `bound` what is
    proven otherwise."""

    streams: tuple[tuple[Unit, ...], ...]
    time: float
    proven: bool
    bound: float


def optimal(
    placement: tuple[tuple[int, ...], ...],
    microbatches: int,
    costs: Costs,
    limit: float | None = None,
    *,
    by: By = "makespan",
    hint: Sequence[Sequence[Unit]] | None = None,
    effort: float = 30.0,
) -> Optimum:
    """The quickest order of a placement that keeps at most `limit` microbatches a rank.

    `hint` are streams to begin with, `effort` is in the solver's deterministic seconds. Raises PentadError without
    OR-Tools, and where the effort finds no order at all.
    """
    solver = _load()
    chunks = len(placement[0])
    room = room_of(limit, chunks, len(placement), microbatches)
    problem = Problem(placement, microbatches, chunks, costs, room, by)
    model, starts, last = _model(solver, problem, orders_of(problem, hint) if hint else None)
    search = solver.CpSolver()
    search.parameters.max_deterministic_time = effort
    search.parameters.num_workers = 1
    search.parameters.random_seed = 0
    status = search.solve(model)
    if status not in (solver.OPTIMAL, solver.FEASIBLE):
        raise PentadError(f"effort is {effort:g}, but no order was found in it: expected more or a hint")
    begun = [search.value(start) for start in starts]
    orders: Orders = [sorted(numbers, key=lambda each: (begun[each], each)) for numbers in _by_rank(problem)]
    unit = _unit(problem)
    time, bound = (problem.span(round(each) * unit) for each in (search.value(last), search.best_objective_bound))
    return Optimum(streams_of(problem, orders), time, status == solver.OPTIMAL, bound)


def _model(solver: Any, problem: Problem, hint: Orders | None) -> tuple[Any, list[Any], Any]:
    """The model, the starts of all operations and the objective, in the greatest unit that all times are whole in."""
    model, unit = solver.CpModel(), _unit(problem)
    seconds = [each // unit for each in problem.seconds]
    hops = [each // unit for each in problem.hops]
    horizon = sum(seconds) + sum(hops) + sum(problem.handicap) // unit
    starts = [model.new_int_var(0, horizon, f"start{each}") for each in range(problem.size)]
    last = model.new_int_var(0, horizon, "last")
    size, many = problem.stages * problem.microbatches, problem.microbatches
    for each in range(problem.size):
        need = problem.needs[each]
        if need >= 0:
            model.add(starts[each] >= starts[need] + seconds[need] + hops[each])
        if each >= 2 * size:  # W after its B
            model.add(starts[each] >= starts[each - size] + seconds[each - size])
        if each % many:
            model.add(starts[each] >= starts[each - 1] + seconds[each - 1])
    for rank, numbers in enumerate(_by_rank(problem)):
        model.add_no_overlap(
            [model.new_fixed_size_interval_var(starts[each], seconds[each], f"run{each}") for each in numbers]
        )
        units = [UNITS[each // size] for each in numbers]
        model.add_reservoir_constraint([starts[each] for each in numbers], units, 0, problem.room[rank])
        for each in numbers:
            model.add(last >= starts[each] + seconds[each] + problem.handicap[rank] // unit)
    if hint is not None and (timing := timed(problem, hint)):
        for start, begun in zip(starts, timing.starts, strict=True):
            model.add_hint(start, begun // unit)
    model.minimize(last)
    return model, starts, last


def _by_rank(problem: Problem) -> list[list[int]]:
    kinds, many = range(3), problem.microbatches
    return [
        [(kind * problem.stages + stage) * many + mb for kind in kinds for stage in held for mb in range(many)]
        for held in problem.placement
    ]


def _unit(problem: Problem) -> int:
    return gcd(*problem.seconds, *problem.hops, *problem.handicap)


def _load() -> Any:
    try:
        return importlib.import_module("ortools.sat.python.cp_model")
    except ImportError:
        raise PentadError(
            "OR-Tools, which proves optima, is not installed: expected pip install 'pentad[solver]'"
        ) from None
