"""How long steps take if compute deviates from its costs, on any number of replicas: quantiles from 5 to 95 %.

Replicas run the same program, so one is simulated many times, with random factors:

- Ranks that split a layer (tp, cp, ep) wait for each other inside every instruction, which takes the longest of their
  drawn times. A rank's clock deviates for a whole step, and each instruction in addition.
- Ranks of a pipeline wait for each other where the program has them wait.
- Replicas wait for each other once a step, at the last reduction. So a step of R replicas takes as long as the longest
  of R independent ones: if one takes at most t with probability p(t), all do with p(t)^R. Sums of many drawn times are
  close to normal: p is that of the normal distribution with the mean and deviation of the simulated replicas.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from pentad.schedules.ir.columns import Array, op_mask
from pentad.schedules.ir.program import Program
from pentad.schedules.simulate.costs import RUNS_KERNELS
from pentad.schedules.simulate.events import Events
from pentad.schedules.simulate.toposort import WIDE, earliest_times, topological_levels

QUANTILES = (0.05, 0.5, 0.95)


@dataclass(frozen=True)
class Deviations:
    """Standard deviations of logarithms of compute seconds: of an `instruction`, and of a `rank` for a whole step."""

    instruction: float
    rank: float


class StepBand(NamedTuple):
    """Seconds that 5, 50 and 95 % of steps take at most."""

    low: float
    middle: float
    high: float


def drawn_factors(program: Program, deviations: Deviations, together: int, random: np.random.Generator) -> Array:
    """[rows] a random factor for the seconds of each row in a step of a replica, where `together` ranks split every
    instruction."""
    columns, factors = program.columns, np.ones(program.columns.rows)
    rows = columns.rows_of(op_mask(RUNS_KERNELS))
    clocks = deviations.rank * random.standard_normal((program.ranks, together))
    logs = deviations.instruction * random.standard_normal((len(rows), together)) + clocks[columns.rank[rows]]
    factors[rows] = np.exp(logs.max(axis=1))
    return factors


def replica_seconds(
    program: Program, events: Events, seconds: Array, deviations: Deviations, together: int, draws: int, seed: int = 0
) -> Array:
    """[draws] seconds of random steps of one replica, whose rows take `seconds` without deviations."""
    random, columns = np.random.default_rng(seed), program.columns
    first, second = np.zeros((2, len(events.action), draws))
    pairs = np.flatnonzero(columns.is_second)
    for draw in range(draws):
        drawn = seconds * drawn_factors(program, deviations, together, random)
        first[:, draw] = drawn[columns.action_row][events.action]
        second[events.event[columns.action[pairs]], draw] = drawn[pairs]
    graph = events.graph._replace(width=WIDE)
    _, ends = earliest_times(graph, topological_levels(graph), first, second)
    return ends.max(axis=0)


def band_of(steps: Array, replicas: int) -> StepBand:
    """The band for this many replicas, from at least two `steps` of one."""
    mean, deviation = float(np.mean(steps)), float(np.std(steps, ddof=1))
    normal = NormalDist()
    return StepBand(*(mean + deviation * normal.inv_cdf(each ** (1 / replicas)) for each in QUANTILES))
