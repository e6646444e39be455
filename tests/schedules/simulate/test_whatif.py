"""Each scenario's figures are those of a simulation with its costs; worse costs give no shorter step."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from pentad.schedules.compiler import compile_program
from pentad.schedules.simulate.costs import Costs
from pentad.schedules.simulate.simulate import simulate
from pentad.schedules.simulate.whatif import Row, what_if

PROGRAMS = [("gpipe", 3, 4), ("1f1b", 4, 6), ("zb-h2", 3, 6), ("zb-v", 3, 6), ("dualpipe", 4, 8)]
compiled = cache(compile_program)


def costs_of(stages: int) -> Costs:
    each = [tuple(1 + (stage * k % 7) / 8 for stage in range(stages)) for k in (1, 2, 3)]
    return Costs(each[0], each[1], each[2], transfer=0.3, reduce=0.7, norm=0.2, step=0.4, launch=0.1)


def row(name: str, program_costs: tuple, costs: Costs) -> Row:
    program, plain = program_costs
    timeline, before = simulate(program, costs), simulate(program, plain).makespan
    return Row(name, timeline.makespan, timeline.longest, 100 * (timeline.makespan / before - 1))


@pytest.mark.parametrize(("name", "ranks", "microbatches"), PROGRAMS)
def test_a_scenario_is_a_simulation_with_its_costs(name: str, ranks: int, microbatches: int) -> None:
    program = compiled(name, ranks, microbatches, replicas=2)
    costs = costs_of(program.stages)
    own = (program, costs)
    slow = [tuple(1.2 if r == rank else 1.0 for r in range(ranks)) for rank in range(ranks)]
    assert what_if(program, costs) == [
        row("as it is", own, costs),
        *(row(f"rank {rank} 1.2x slower", own, replace(costs, slow=slow[rank])) for rank in range(ranks)),
        row("links at half speed", own, replace(costs, transfer=0.6)),
        row("transfers free", own, replace(costs, transfer=0.0)),
        row("launches twice as long", own, replace(costs, launch=0.2)),
        row("W free", own, replace(costs, weight=(0.0,) * program.stages)),
    ]


@pytest.mark.parametrize(("name", "ranks", "microbatches"), PROGRAMS)
def test_worse_costs_give_no_shorter_step_and_better_ones_no_longer_one(
    name: str, ranks: int, microbatches: int
) -> None:
    program = compiled(name, ranks, microbatches)
    for found in what_if(program, costs_of(program.stages)):
        if "free" in found.name:
            assert found.change <= 0
        else:
            assert found.change >= 0


def test_speeds_and_links_that_are_given_are_scaled() -> None:
    program = compiled("1f1b", 2, 4)
    links = ((0.0, 0.5), (0.25, 0.0))
    costs = replace(costs_of(2), slow=(1.0, 2.0), links=links)
    found = {row.name: row for row in what_if(program, costs)}
    slower = simulate(program, replace(costs, slow=(1.0, 2.4)))
    assert found["rank 1 1.2x slower"].makespan == slower.makespan
    halved = simulate(program, replace(costs, links=((0.0, 1.0), (0.5, 0.0))))
    assert found["links at half speed"].makespan == halved.makespan
