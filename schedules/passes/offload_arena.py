"""Where offloaded activations are stored: addresses in one block of host memory and, for the parts of cut tensors that
stay, in one block of device memory. Lifetimes follow from the program, so slots are assigned once and nothing is
allocated in a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np

from pentad.schedules.ir.columns import CODE, Array, op_mask
from pentad.schedules.ir.instruction import COMPUTE, Op
from pentad.schedules.ir.program import Program
from pentad.schedules.passes.offload_cut import ALIGNMENT
from pentad.schedules.passes.zero import rows_of_rank
from pentad.schedules.passes.zero_buffers import first_fit, most_in_use, overlapping

_IS_OFFLOAD, _ON_COMPUTE_LANE = op_mask({Op.OFFLOAD}), op_mask({*COMPUTE, Op.RECOMPUTE})
_Cell = tuple[int, int]  # stage, microbatch


class Arena(NamedTuple):
    """`offsets[cell]` are the byte offsets of an activation's slots on the host and on the device, `bytes` the sizes of
    both blocks, and `bounds` the most bytes in use at once, which no layout can undercut."""

    offsets: dict[_Cell, tuple[int, int]]
    bytes: tuple[int, int]
    bounds: tuple[int, int]


def arena(program: Program, rank: int, slots: Sequence[tuple[int, int]]) -> Arena:
    """The arena of a pipeline rank; `slots[stage]` are the bytes that an activation needs on the host and on the
    device.

    Slots are placed largest first, each at the lowest address that is free during its lifetime: from OFFLOAD to the
    instruction that waits for its RELOAD. A later OFFLOAD waits for a forward after that instruction, and so may reuse
    the slot.
    """
    columns, first = program.columns, rows_of_rank(program, rank, _IS_OFFLOAD)
    if not len(first):
        return Arena({}, (0, 0), (0, 0))
    waits = slice(*columns.wait_offsets[columns.rank_offsets[rank : rank + 2]])
    op, stage, microbatch, row = (
        each[waits] for each in (columns.wait_op, columns.wait_stage, columns.wait_microbatch, columns.wait_row)
    )
    ends = (op == CODE[Op.RELOAD]) & _ON_COMPUTE_LANE[columns.op[row]]
    last_row = np.zeros((program.stages, program.total_slices), int)
    last_row[stage[ends], microbatch[ends]] = row[ends]
    cell = columns.stage[first], columns.microbatch[first]
    last, bytes_of = last_row[cell], -(-np.array(slots) // ALIGNMENT) * ALIGNMENT
    sizes = bytes_of[cell[0]].T
    offsets = _offsets(first, last, sizes)
    layouts = zip(offsets, sizes, strict=True)
    found = ((int((at + size).max()), int(most_in_use(first, last, size))) for at, size in layouts)
    totals, bounds = zip(*found, strict=True)
    cells, pairs = (zip(*(each.tolist() for each in both), strict=True) for both in (cell, offsets))
    return Arena(dict(zip(cells, pairs, strict=True)), totals, bounds)


def _offsets(first: Array, last: Array, sizes: Array) -> list[Array]:
    """Offsets for each row of `sizes`."""
    lowest = cache(lambda: _lowest_slots(first, last))
    return [
        lowest() * each[0] if (each == each[0]).all() else first_fit(each, overlapping(first, last)) for each in sizes
    ]


def _lowest_slots(first: Array, last: Array) -> Array:
    """The lowest free slot for each lifetime, sorted by begin: what `first_fit` finds for equal sizes, in less time."""
    found, free, taken = list[int](), list[int](), list[tuple[int, int]]()  # taken: (end, slot)
    for begin, end in zip(first.tolist(), last.tolist(), strict=True):
        while taken and taken[0][0] <= begin:
            heappush(free, heappop(taken)[1])
        found.append(heappop(free) if free else len(taken))
        heappush(taken, (end, found[-1]))
    return np.array(found)
