"""The costs of a pipeline are recovered from the times of its ranks."""

from __future__ import annotations

import pytest

from pentad.schedules.compiler import compile_program
from pentad.schedules.diagnosis.rank_costs import costs_of_ranks
from pentad.schedules.diagnosis.rank_times import RankTime, times_of_step
from pentad.schedules.ir.program import Program
from pentad.schedules.simulate.costs import Costs
from pentad.schedules.simulate.simulate import simulate
from pentad.schedules.spec.mesh import Mesh


def times(program: Program, mesh: Mesh, costs: Costs, slow: dict[int, float]) -> tuple[RankTime, ...]:
    """Rank times of a step whose pipelines do not wait for each other. `slow` maps ranks to slowdown factors."""
    found = times_of_step(program, Mesh(pp=mesh.pp), simulate(program, costs).spans, ())
    return tuple(
        each._replace(rank=rank, seconds=each.seconds * slow.get(rank, 1.0))
        for rank in range(mesh.size)
        for each in found
        if each.rank == mesh.coordinates(rank).pp
    )


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_costs_are_those_of_the_fastest_replica_and_slowness_that_of_the_slowest(name: str) -> None:
    program, mesh = compile_program(name, 3, 6), Mesh(dp=2, pp=3)
    costs = Costs((2.0, 2.0, 3.0), (4.0, 4.0, 6.0), (4.0, 4.0, 6.0))
    found = costs_of_ranks(program, mesh, [times(program, mesh, costs, {mesh.move(mesh.size - 1, pp=1): 1.25})])
    assert found is not None and found.slowdown == pytest.approx((1.0, 1.25, 1.0))
    for field in ("forward", "backward", "weight"):
        assert getattr(found, field) == pytest.approx(getattr(costs, field))


def test_one_odd_step_does_not_count_and_missing_ops_are_refused() -> None:
    program, mesh, costs = compile_program("1f1b", 2, 4), Mesh(pp=2), Costs((1.0, 2.0), (1.0, 2.0), (1.0, 2.0))
    usual = times(program, mesh, costs, {})
    found = costs_of_ranks(program, mesh, [usual, times(program, mesh, costs, {1: 9.0}), usual])
    assert found is not None and found.forward == pytest.approx((1.0, 2.0)) and found.slowdown == (1.0, 1.0)
    assert costs_of_ranks(program, mesh, [[each for each in usual if each.rank == 0]]) is None


def test_what_a_rank_is_starved_is_no_cost() -> None:
    program, mesh, costs = compile_program("1f1b", 2, 4), Mesh(pp=2), Costs((1.0, 2.0), (1.0, 2.0), (1.0, 2.0))
    late = tuple(
        each._replace(starved=each.seconds / 2) if each.rank == 1 else each
        for each in times(program, mesh, costs, {1: 2.0})
    )
    found = costs_of_ranks(program, mesh, [late])
    assert found is not None and found.forward == pytest.approx(costs.forward) and found.slowdown == (1.0, 1.0)
