"""Layers are moved off the busiest rank as long as that shortens the simulated step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from pentad.schedules.compiler import compile_program
from pentad.schedules.ir.program import Program
from pentad.schedules.search.layer_moves import LayerMoves, best_layers
from pentad.schedules.simulate.costs import Costs
from pentad.schedules.simulate.simulate import simulate_step_time
from pentad.schedules.spec.schedule_spec import ScheduleOptions


def compiled(name: str, ranks: int, microbatches: int, chunks: int | None = None) -> Program:
    return compile_program(name, ranks, microbatches, options=ScheduleOptions(chunks=chunks))


def costs_of(program: Program, layers: Sequence[int], slow: int, factor: float) -> Costs:
    """Every layer costs one second, or `factor` seconds on the slow rank."""
    rates = [factor if stage in program.placement[slow] else 1.0 for stage in range(program.stages)]
    seconds = tuple(count * rate for count, rate in zip(layers, rates, strict=True))
    return Costs(seconds, seconds, seconds)


def moves_of(program: Program, layers: Sequence[int], slow: int, factor: float = 1.15) -> LayerMoves:
    return best_layers(program, costs_of(program, layers, slow, factor), layers, lambda sizes: sizes)


def recovered(program: Program, layers: Sequence[int], slow: int) -> float:
    """The share that moving layers recovers of the time that a rank 15 % slower costs."""
    moves, even = moves_of(program, layers, slow), costs_of(program, layers, slow, 1.0)
    return (moves.before - moves.after) / (moves.before - simulate_step_time(program, even).makespan)


def divisions(layers: int, stages: int) -> Iterator[tuple[int, ...]]:
    if stages == 1:
        yield (layers,)
        return
    for first in range(1, layers - stages + 2):
        yield from ((first, *rest) for rest in divisions(layers - first, stages - 1))


@pytest.mark.parametrize(
    ("name", "ranks", "layers", "slow"),
    [("1f1b", 2, (9, 9), 1), ("1f1b", 3, (4, 4, 5), 2), ("zb-h1", 3, (5, 5, 5), 1), ("interleaved", 2, (2,) * 4, 1)],
)
def test_no_division_is_much_better(name: str, ranks: int, layers: tuple[int, ...], slow: int) -> None:
    program = compiled(name, ranks, 6, 2 if len(layers) > ranks else None)
    moves = moves_of(program, layers, slow, 1.4)
    best = min(
        simulate_step_time(program, costs_of(program, each, slow, 1.4)).makespan
        for each in divisions(sum(layers), len(layers))
    )
    assert best <= moves.after <= 1.03 * best and moves.after < moves.before
    assert moves.after == pytest.approx(
        simulate_step_time(program, costs_of(program, moves.layers, slow, 1.4)).makespan
    )


@pytest.mark.parametrize(
    ("layers", "slow", "least"),
    [((2, 3), 1, 1.0), ((2, 2, 3, 3), 3, 1.0), ((14,) * 2, 1, 0.49), ((16,) * 4, 1, 0.5)],
)
def test_half_of_what_a_slow_rank_costs_is_recovered_where_layers_allow_it(
    layers: tuple[int, ...], slow: int, least: float
) -> None:
    assert recovered(compiled("1f1b", len(layers), 16), layers, slow) >= least


@pytest.mark.parametrize(("layers", "share"), [(6, 0.0), (8, 0.22), (16, 0.52), (24, 0.64)])
def test_more_is_recovered_with_more_layers(layers: int, share: float) -> None:
    """The figures of docs/faulty-ranks.md."""
    assert recovered(compiled("1f1b", 4, 16), (layers,) * 4, 1) == pytest.approx(share, abs=0.005)


def test_ranks_that_are_even_keep_their_layers() -> None:
    moves = moves_of(compiled("1f1b", 4, 8), (3,) * 4, 1, 1.0)
    assert moves.layers == (3,) * 4 and moves.gain == 0


def test_ranks_that_hold_the_same_stages_keep_their_layers() -> None:
    program, seconds = compiled("dualpipe", 2, 4), (4.7, 4.7)
    costs = Costs(seconds, seconds, seconds, slowdown=(1.0, 1.3))
    assert best_layers(program, costs, (5, 5), lambda sizes: sizes).layers == (5, 5)


def test_a_rank_of_one_layer_a_stage_keeps_it() -> None:
    assert moves_of(compiled("1f1b", 2, 4), (1, 1), 1, 3.0).gain == 0


@pytest.mark.parametrize(("layers", "slow"), [((2, 3), 1), ((2, 2, 3, 3), 3)])
def test_beside_the_best_division_of_even_ranks_most_is_recovered(layers: tuple[int, ...], slow: int) -> None:
    """A figure of docs/faulty-ranks.md."""
    program = compiled("1f1b", len(layers), 8)
    moves = moves_of(program, layers, slow)
    even = simulate_step_time(program, costs_of(program, moves.layers, slow, 1.0)).makespan
    assert (moves.before - moves.after) / (moves.before - even) == pytest.approx(0.87, abs=0.005)
