"""The search finds the proven optima of small steps; no schedule beats them and no bound exceeds them.

The optima were proven with a constraint solver (OR-Tools CP-SAT): an integer start for every F, B and W, each kind
in microbatch order, no overlap on a rank, data dependencies with transfers, and a reservoir of activations per rank.
"""

from __future__ import annotations

import random

import pytest

from pentad.schedules.catalogue import generate
from pentad.schedules.search.auto import choose
from pentad.schedules.search.bounds import lower_bound
from pentad.schedules.search.problem import Objective
from pentad.schedules.simulate.costs import Costs
from pentad.schedules.spec.schedule_spec import ScheduleOptions

ONE_STAGE, LOOPED_CHUNKS, VEE = "1f1b", "interleaved", "zb-v"  # a schedule of each placement
# (placement, ranks, microbatches, memory limit, objective, seed of the costs, optimum)
PROVEN: list[tuple[str, int, int, float | None, Objective, int, float]] = [
    (ONE_STAGE, 2, 3, 1.5, "makespan", 0, 92.0),
    (ONE_STAGE, 2, 4, 2.0, "makespan", 1, 89.0),
    (ONE_STAGE, 3, 3, None, "makespan", 2, 63.0),
    (ONE_STAGE, 3, 4, 1.5, "makespan", 3, 117.0),
    (LOOPED_CHUNKS, 2, 3, 2.5, "makespan", 4, 82.0),
    (LOOPED_CHUNKS, 2, 4, None, "makespan", 5, 156.0),
    (LOOPED_CHUNKS, 3, 3, 2.0, "longest", 6, 122.0),
    (LOOPED_CHUNKS, 3, 4, None, "makespan", 7, 124.0),
    (VEE, 2, 3, None, "longest", 8, 87.0),
    (VEE, 2, 4, None, "makespan", 9, 131.0),
    (VEE, 3, 3, 1.0, "makespan", 10, 178.0),
    (VEE, 3, 4, 2.5, "longest", 11, 161.0),
    (ONE_STAGE, 2, 3, None, "makespan", 12, 57.0),
    (ONE_STAGE, 2, 4, None, "makespan", 13, 80.0),
    (ONE_STAGE, 3, 3, 1.5, "longest", 14, 123.0),
    (ONE_STAGE, 3, 4, 1.0, "makespan", 15, 136.0),
    (LOOPED_CHUNKS, 2, 3, 2.5, "longest", 16, 96.0),
    (LOOPED_CHUNKS, 2, 4, 2.5, "makespan", 17, 152.0),
    (LOOPED_CHUNKS, 3, 3, None, "makespan", 18, 104.0),
    (LOOPED_CHUNKS, 3, 4, 1.5, "makespan", 19, 186.0),
    (VEE, 2, 3, 2.5, "makespan", 20, 117.0),
    (VEE, 2, 4, 2.5, "makespan", 21, 143.0),
    (VEE, 3, 3, 2.5, "makespan", 22, 100.0),
    (VEE, 3, 4, 2.0, "longest", 23, 163.0),
]


def random_costs(seed: int, stages: int) -> Costs:
    """Integers: 2 to 8 for F, B and W, 0 to 2 for a transfer."""
    rng = random.Random(seed)
    f, b, w = (tuple(float(rng.randint(2, 8)) for _ in range(stages)) for _ in range(3))
    return Costs(f, b, w, float(rng.randint(0, 2)))


@pytest.mark.sampled(8)
@pytest.mark.parametrize(("name", "ranks", "microbatches", "limit", "objective", "seed", "optimum"), PROVEN)
def test_the_search_finds_the_optimum_and_nothing_beats_it(
    name: str, ranks: int, microbatches: int, limit: float | None, objective: Objective, seed: int, optimum: float
) -> None:
    order = generate(name, ranks, microbatches)
    costs = random_costs(seed, order.stages)
    choice = choose(
        ranks,
        microbatches,
        lambda other: costs if other.placement == order.placement else None,
        ScheduleOptions(memory_limit=limit),
        objective,
        effort=300_000,
    )
    assert getattr(choice.best, objective) == pytest.approx(optimum)
    assert min(getattr(each, objective) for each in choice.candidates) >= optimum * (1 - 1e-9)
    assert lower_bound(order, costs, limit, objective).time <= optimum * (1 + 1e-9)
