"""Bands of step times, compared with simulations of all replicas together."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from pentad.schedules.compiler import compile_program
from pentad.schedules.ir.columns import Array
from pentad.schedules.ir.instruction import COLLECTIVES
from pentad.schedules.ir.program import Program
from pentad.schedules.simulate.costs import RUNS_KERNELS, Costs, instruction_seconds
from pentad.schedules.simulate.deviations import Deviations, band_of, drawn_factors, replica_seconds
from pentad.schedules.simulate.events import Events, acyclic_events
from pentad.schedules.simulate.simulate import event_times
from pentad.schedules.spec.schedule_spec import MemoryOptions

SMALL = Deviations(0.02, 0.01)
PROGRAMS = [("1f1b", 4, 8, 0), ("interleaved", 2, 4, 1), ("zb-h1", 3, 6, 1), ("1f1b", 2, 6, 2), ("dualpipev", 2, 4, 0)]


def case(name: str, ranks: int, microbatches: int, zero: int) -> tuple[Program, Events, Costs]:
    memory = MemoryOptions(zero=zero)
    program = compile_program(name, ranks, microbatches, replicas=2, memory_options=memory)
    each = tuple(1 + (stage % 3) / 8 for stage in range(program.stages))
    costs = replace(Costs(each, each, each, transfer=0.1), reduce=(0.4,) * program.stages, step=0.2)
    return program, acyclic_events(program), costs


@pytest.mark.parametrize(("name", "ranks", "microbatches", "zero"), PROGRAMS)
def test_without_deviations_all_steps_are_the_simulated_one(
    name: str, ranks: int, microbatches: int, zero: int
) -> None:
    program, events, costs = case(name, ranks, microbatches, zero)
    steps = replica_seconds(program, events, instruction_seconds(program, costs), Deviations(0.0, 0.0), 4, 3)
    assert steps == pytest.approx([event_times(program, events, costs).ends.max()] * 3)
    assert band_of(steps, 1000) == pytest.approx([steps[0]] * 3)


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("together", "replicas"), [(1, 1), (1, 8), (4, 8)])
@pytest.mark.parametrize(("name", "ranks", "microbatches", "zero"), PROGRAMS)
def test_the_band_is_that_of_all_replicas_simulated_together(
    name: str, ranks: int, microbatches: int, zero: int, together: int, replicas: int
) -> None:
    program, events, costs = case(name, ranks, microbatches, zero)
    seconds = instruction_seconds(program, costs)
    low, middle, high = band_of(replica_seconds(program, events, seconds, SMALL, together, 64), replicas)
    joint = [joint_seconds(program, events, seconds, together, replicas, seed) for seed in range(60)]
    expected = np.quantile(joint, (0.05, 0.5, 0.95))
    assert (low, middle, high) == pytest.approx(expected, rel=0.006)
    assert low < middle < high


def joint_seconds(program: Program, events: Events, seconds: Array, together: int, replicas: int, seed: int) -> float:
    """Seconds of a step of all replicas. Replicas of a stage start a collective together; the deviation of each rank
    that shares a layer is drawn."""
    random, columns = np.random.default_rng(1000 + seed), program.columns
    factors = np.ones((replicas, len(seconds)))
    for rank, (first, end) in enumerate(pairwise(columns.rank_offsets.tolist())):
        parts = [part for action in program.streams[rank] for part in action.parts]
        clocks = SMALL.rank * random.standard_normal((replicas, together))
        for row, part in zip(range(first, end), parts, strict=True):
            if part.op in RUNS_KERNELS:
                logs = clocks + SMALL.instruction * random.standard_normal((replicas, together))
                factors[:, row] = np.exp(logs.max(axis=1))
    took = np.zeros((len(events.action), replicas))
    collective = np.zeros(len(events.action), bool)
    flat = [part for stream in program.streams for action in stream for part in action.parts]
    for row, action in enumerate(columns.action.tolist()):
        event = events.event[action]
        if columns.action_row[events.action[event]] == row or columns.is_second[row]:
            took[event] += seconds[row] * factors[:, row]
            collective[event] = flat[row].op in COLLECTIVES and flat[row].group != ""
    before: list[list[int]] = [[] for _ in took]
    for source, target in zip(events.graph.source.tolist(), events.graph.target.tolist(), strict=True):
        before[target].append(source)
    ends = np.zeros_like(took)
    for event in events.order.tolist():
        start = ends[before[event]].max(axis=0) if before[event] else np.zeros(replicas)
        ends[event] = (start.max() if collective[event] else start) + took[event]
    return float(ends.max())


def test_ranks_that_split_a_layer_take_as_long_as_the_slowest() -> None:
    program, _, _ = case("1f1b", 4, 8, 0)
    random = np.random.default_rng(0)
    rows = [drawn_factors(program, Deviations(0.02, 0.0), 8, random) for _ in range(50)]
    computes = np.array(rows)[:, [part.op in RUNS_KERNELS for s in program.streams for a in s for part in a.parts]]
    expected = np.exp(0.02 * np.random.default_rng(1).standard_normal((4000, 8)).max(axis=1)).mean()
    assert computes.mean() == pytest.approx(expected, rel=1e-3)
    assert np.delete(np.array(rows), np.flatnonzero(np.array(rows)[0] != 1), axis=1).min() == 1.0


def test_more_replicas_take_longer() -> None:
    program, events, costs = case("1f1b", 4, 8, 0)
    steps = replica_seconds(program, events, instruction_seconds(program, costs), SMALL, 1, 32)
    bands = [band_of(steps, replicas) for replicas in (1, 8, 64, 2048)]
    assert all(few.middle < more.middle and few.low < more.low for few, more in pairwise(bands))
    assert bands[0].middle == pytest.approx(steps.mean())
