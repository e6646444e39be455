"""Proven optima of small steps hold search, catalogue and bounds; OR-Tools, where it is, proves them anew."""

from __future__ import annotations

import importlib.util
import random

import pytest

from pentad.schedules.catalogue import generate
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.ir.program import Program
from pentad.schedules.search import solver
from pentad.schedules.search.auto import choose
from pentad.schedules.search.bounds import lower_bound
from pentad.schedules.search.search_problem import By
from pentad.schedules.search.solver import optimal
from pentad.schedules.simulate.costs import Costs
from pentad.schedules.simulate.dependencies import compute_times
from pentad.schedules.spec.schedule_spec import Options
from pentad.schedules.verify.check import check_order, peak_activations

needs_ortools = pytest.mark.skipif(
    importlib.util.find_spec("ortools") is None, reason="needs OR-Tools: pip install 'pentad[solver]'"
)
LOOPED, TURNS, VEE = "1f1b", "interleaved", "zb-v"  # some order of each placement
# (placement, ranks, microbatches, limit, objective, seed of the costs, optimum that was proven)
PROVEN: list[tuple[str, int, int, float | None, By, int, float]] = [
    (LOOPED, 2, 3, 1.5, "makespan", 0, 92.0),
    (LOOPED, 2, 4, 2.0, "makespan", 1, 89.0),
    (LOOPED, 3, 3, None, "makespan", 2, 63.0),
    (LOOPED, 3, 4, 1.5, "makespan", 3, 117.0),
    (TURNS, 2, 3, 2.5, "makespan", 4, 82.0),
    (TURNS, 2, 4, None, "makespan", 5, 156.0),
    (TURNS, 3, 3, 2.0, "longest", 6, 122.0),
    (TURNS, 3, 4, None, "makespan", 7, 124.0),
    (VEE, 2, 3, None, "longest", 8, 87.0),
    (VEE, 2, 4, None, "makespan", 9, 131.0),
    (VEE, 3, 3, 1.0, "makespan", 10, 178.0),
    (VEE, 3, 4, 2.5, "longest", 11, 161.0),
    (LOOPED, 2, 3, None, "makespan", 12, 57.0),
    (LOOPED, 2, 4, None, "makespan", 13, 80.0),
    (LOOPED, 3, 3, 1.5, "longest", 14, 123.0),
    (LOOPED, 3, 4, 1.0, "makespan", 15, 136.0),
    (TURNS, 2, 3, 2.5, "longest", 16, 96.0),
    (TURNS, 2, 4, 2.5, "makespan", 17, 152.0),
    (TURNS, 3, 3, None, "makespan", 18, 104.0),
    (TURNS, 3, 4, 1.5, "makespan", 19, 186.0),
    (VEE, 2, 3, 2.5, "makespan", 20, 117.0),
    (VEE, 2, 4, 2.5, "makespan", 21, 143.0),
    (VEE, 3, 3, 2.5, "makespan", 22, 100.0),
    (VEE, 3, 4, 2.0, "longest", 23, 163.0),
]


def drawn(seed: int, stages: int) -> Costs:
    """Whole numbers from 2 to 8, a transfer from 0 to 2."""
    rng = random.Random(seed)
    f, b, w = (tuple(float(rng.randint(2, 8)) for _ in range(stages)) for _ in range(3))
    return Costs(f, b, w, float(rng.randint(0, 2)))


def length(program: Program, costs: Costs, by: By) -> float:
    times = compute_times(program, costs)
    return max(spans[-1][1] - (spans[0][0] if by == "longest" else 0.0) for spans in times)


@pytest.mark.parametrize(("name", "ranks", "microbatches", "limit", "by", "seed", "optimum"), PROVEN)
def test_auto_finds_the_optimum_and_nothing_beats_it(name, ranks, microbatches, limit, by, seed, optimum):
    placed = generate(name, ranks, microbatches)
    costs = drawn(seed, placed.stages)
    choice = choose(
        ranks,
        microbatches,
        lambda other: costs if other.placement == placed.placement else None,
        Options(memory_limit=limit),
        by,
        effort=300_000,
    )
    assert getattr(choice.best, by) == pytest.approx(optimum)
    assert min(getattr(each, by) for each in choice.candidates) >= optimum * (1 - 1e-9)
    assert lower_bound(placed, costs, limit, by).time <= optimum * (1 + 1e-9)


@needs_ortools
@pytest.mark.parametrize(("name", "ranks", "microbatches", "limit", "by", "seed", "optimum"), PROVEN)
def test_the_optimum_is_proven(name, ranks, microbatches, limit, by, seed, optimum):
    placed = generate(name, ranks, microbatches)
    costs = drawn(seed, placed.stages)
    found = optimal(placed.placement, microbatches, costs, limit, by=by)
    assert found.proven
    assert found.time == found.bound == pytest.approx(optimum)
    program = Program("optimal", found.streams, placed.placement, microbatches, placed.chunks)
    check_order(program)
    assert length(program, costs, by) == pytest.approx(optimum)
    assert limit is None or max(peak_activations(program)) <= limit + 1e-9


@needs_ortools
@pytest.mark.parametrize("name", ["zb-h1", "zb-1p"])
def test_zb_h1_is_optimal_in_the_memory_of_1f1b(name):
    """p=3, m=4, equal costs, with the schedule itself as the solver's hint."""
    program = generate(name, 3, 4)
    found = optimal(program.placement, 4, Costs.uniform(3), 3.0, hint=program.streams)
    assert found.proven and found.time == pytest.approx(length(program, Costs.uniform(3), "makespan"))


def test_without_the_solver_a_sentence_says_what_to_install(monkeypatch):
    def missing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(solver.importlib, "import_module", missing)
    with pytest.raises(PentadError, match=r"^OR-Tools, .* is not installed: expected pip install 'pentad\[solver\]'$"):
        optimal(((0,), (1,)), 2, Costs.uniform(2))
