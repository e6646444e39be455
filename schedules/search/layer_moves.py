"""Moves layers between pipeline stages, so that a slow rank has fewer of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from pentad.schedules.ir.program import Program
from pentad.schedules.simulate.costs import Costs
from pentad.schedules.simulate.events import acyclic_events
from pentad.schedules.simulate.simulate import simulate_step_time

TRIED = 16  # how many moves are simulated for each layer
WorkOf = Callable[[Sequence[int]], Sequence[float]]  # work of each stage, in any unit, from its number of layers


class LayerMoves(NamedTuple):
    """`layers` of each stage, and the simulated seconds of a step with the present ones (`before`) and with these
    (`after`)."""

    layers: tuple[int, ...]
    before: float
    after: float

    @property
    def gain(self) -> float:
        """Share of a step's time that is saved."""
        return 1 - self.after / self.before


def best_layers(program: Program, costs: Costs, layers: Sequence[int], work_of: WorkOf) -> LayerMoves:
    """The layers of stages with the shortest simulated step found. `costs` are those of the present `layers`, and
    change with the work of a stage.

    Layers leave the busiest rank one by one, as long as that lowers the loads of the ranks, compared from the busiest
    down. Each goes to the stage that makes the step shortest, of the TRIED with the lowest loads.
    """
    work, events = work_of(layers), acyclic_events(program)

    def seconds(layers: Sequence[int]) -> float:
        factors = [now / before for now, before in zip(work_of(layers), work, strict=True)]
        by_unit = scaled(costs, [factors[stage] for stage in program.stage_of])
        return simulate_step_time(program, by_unit, events).makespan

    loads_of = _loads(program, costs, layers, work_of)
    before, now = seconds(layers), tuple(layers)
    best = before, now
    while moves := _lower(now, loads_of, program):
        found = min((seconds(each), each) for each in moves[:TRIED])
        best, now = min(best, found), found[1]
    return LayerMoves(best[1], before, best[0])


def scaled(costs: Costs, factors: Sequence[float]) -> Costs:
    """The costs of stages that take this many times as long to compute."""

    def times(values: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(value * factor for value, factor in zip(values, factors, strict=True)) if values else ()

    forward, backward, weight = times(costs.forward), times(costs.backward), times(costs.weight)
    return replace(costs, forward=forward, backward=backward, weight=weight, recompute=times(costs.recompute))


def _loads(
    program: Program, costs: Costs, layers: Sequence[int], work_of: WorkOf
) -> Callable[[Sequence[int]], list[float]]:
    """A function from the layers of stages to what each rank computes for a microbatch; `costs` are those of the
    present `layers`."""
    at, slowdown = costs.of_stages(program.units), costs.slowdown or (1.0,) * program.ranks
    columns = zip(at.forward, at.backward, at.weight, at.recompute or (0.0,) * len(layers), strict=True)
    rates = [sum(each) / work for each, work in zip(columns, work_of(layers), strict=True)]
    held = list(zip(_placement(program), slowdown, strict=True))

    def loads(sizes: Sequence[int]) -> list[float]:
        work = work_of(sizes)
        return [slow * sum(rates[stage] * work[stage] for stage in stages) for stages, slow in held]

    return loads


def _lower(
    layers: tuple[int, ...], loads: Callable[[Sequence[int]], list[float]], program: Program
) -> list[tuple[int, ...]]:
    """All moves of a layer from the busiest rank that lower the loads by more than rounding, the lowest first."""
    now = loads(layers)
    busiest = _placement(program)[now.index(max(now))]

    def highest_first(layers: Sequence[int]) -> list[float]:
        return sorted((round(load / max(now), 9) for load in loads(layers)), reverse=True)

    moved = (
        tuple(size - (stage == source) + (stage == target) for stage, size in enumerate(layers))
        for source in busiest
        if layers[source] > 1
        for target in range(len(layers))
        if target != source
    )
    ordered = sorted((highest_first(each), each) for each in moved)
    return [each for their, each in ordered if their < highest_first(layers)]


def _placement(program: Program) -> list[list[int]]:
    """The pipeline stages of every rank."""
    return [sorted({program.stage_of[unit] for unit in held}) for held in program.placement]
