"""Pass: cuts every stage into units of a few layers, the granularity of ZeRO, recomputation and offloading.

In the lowered program a unit is a stage, on the same rank as its neighbours, so nothing is sent between them. All later
passes, the proof, the simulator and the workers thus treat units like stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

import numpy as np

from pentad.schedules.ir.columns import CODE, Array, key_columns
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.ir.instruction import Op
from pentad.schedules.ir.program import Program


def split_into_units(order: Program, units: Sequence[int]) -> Program:
    """The compute order in which stage s consists of `units[s]` stages: F runs them upwards, backwards downwards.

    In an overlapped pair, the k-th unit of the forward overlaps with the k-th of the backward, as far as both go.
    Raises PentadError unless there is a count of at least 1 for every stage.
    """
    if len(units) != order.stages or min(units) < 1:
        raise PentadError(
            f"units are {tuple(units)}: expected one count of at least 1 for each of {order.stages} stages"
        )
    if max(units) == 1:
        return order
    columns, counts = order.columns, np.asarray(units)
    first = np.concatenate(([0], np.cumsum(counts)))
    repeats = counts[columns.stage]
    row = np.repeat(np.arange(columns.rows), repeats)
    number = np.arange(len(row)) - np.repeat(np.cumsum(repeats) - repeats, repeats)  # within its row
    upwards = columns.op[row] == CODE[Op.F]
    unit = np.where(upwards, number, repeats[row] - 1 - number) + first[columns.stage[row]]
    is_second = columns.is_second[row]
    at = np.lexsort((is_second, number, columns.action[row]))
    offsets = np.concatenate(([0], np.cumsum(repeats)))[columns.rank_offsets]
    streams = key_columns(offsets, columns.op[row][at], unit[at], columns.microbatch[row][at])
    streams = replace(streams, is_second=_follows_its_forward(is_second[at], number[at]))
    return replace(
        order,
        streams=streams,
        placement=place_units(order.placement, units),
        chunks=order.chunks * max(units),
        units=tuple(units),
    )


def place_units(placement: Sequence[Sequence[int]], units: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """The units of every rank, given its stages; stage s has `units[s]` of them."""
    of_stage = [range(*span) for span in pairwise(accumulate(units, initial=0))]
    return tuple(tuple(unit for stage in held for unit in of_stage[stage]) for held in placement)


def _follows_its_forward(is_second: Array, number: Array) -> Array:
    """Backwards that are the second half of a pair: those right after a forward of the same number."""
    follows = np.zeros_like(is_second)
    follows[1:] = is_second[1:] & ~is_second[:-1] & (number[1:] == number[:-1])
    return follows
