"""What a step would take if one thing were different."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from pentad.schedules.ir.lookup import IS_COMPUTE
from pentad.schedules.ir.program import Program
from pentad.schedules.simulate.costs import Costs
from pentad.schedules.simulate.events import proven_events
from pentad.schedules.simulate.simulate import times_of

SLOWER = 1.2


class Row(NamedTuple):
    """One scenario: both measures of a step in the unit of the costs (see `Bubble`), and by how many percent its
    makespan differs from that of the costs as they are."""

    name: str
    makespan: float
    longest: float
    change: float


def what_if(program: Program, costs: Costs) -> list[Row]:
    """The program with its costs as they are, then with each scenario's. The order of instructions stays as it is:
    another order may suit other costs better."""
    events = proven_events(program)
    compute = np.flatnonzero(IS_COMPUTE[program.columns.op[program.columns.unit_row]])
    at = np.searchsorted(compute, events.first)
    first, last = events.event[compute[at[:-1]]], events.event[compute[at[1:] - 1]]  # of each rank
    rows: list[Row] = []
    for name, other in [("as it is", costs), *_scenarios(program.ranks, costs)]:
        starts, ends, _ = times_of(program, events, other)
        makespan = float(ends[last].max() - starts[first].min())
        longest = float((ends[last] - starts[first]).max())
        rows.append(Row(name, makespan, longest, 100 * (makespan / rows[0].makespan - 1) if rows else 0.0))
    return rows


def _scenarios(ranks: int, costs: Costs) -> Iterator[tuple[str, Costs]]:
    slow = costs.slow or (1.0,) * ranks
    for rank in range(ranks):
        factors = (*slow[:rank], slow[rank] * SLOWER, *slow[rank + 1 :])
        yield f"rank {rank} {SLOWER}x slower", replace(costs, slow=factors)
    yield "links at half speed", _with_links(costs, 2.0)
    yield "transfers free", _with_links(costs, 0.0)
    yield "launches twice as long", replace(costs, launch=2 * costs.launch)
    yield "W free", replace(costs, weight=(0.0,) * len(costs.weight))


def _with_links(costs: Costs, times: float) -> Costs:
    links = tuple(tuple(seconds * times for seconds in row) for row in costs.links)
    return replace(costs, transfer=costs.transfer * times, links=links)
