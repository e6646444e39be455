"""Where offloaded activations lie: addresses in one piece of host memory, and in one of the device for what stays of
tensors that are cut. Lifetimes follow from the program, so slots are assigned once and nothing is allocated in a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from pentad.schedules.ir.instruction import COMPUTE, Op, instructions_of
from pentad.schedules.ir.program import Program
from pentad.schedules.passes.offload_cut import ALIGNMENT
from pentad.schedules.passes.zero_buffers import first_fit, most_in_use

_Cell = tuple[int, int]  # stage, microbatch


class Arena(NamedTuple):
    """`offsets[cell]` are the first bytes of an activation's slots on the host and on the device, `bytes` the sizes of
    both, and `bounds` the most bytes in use at once, below which no layout can be."""

    offsets: dict[_Cell, tuple[int, int]]
    bytes: tuple[int, int]
    bounds: tuple[int, int]


def arena(program: Program, rank: int, slots: Sequence[tuple[int, int]]) -> Arena:
    """For a pipeline rank; `slots[stage]` are the bytes that an activation needs on the host and on the device.

    Largest first, each at the lowest address that is free during its lifetime: from OFFLOAD to the instruction that
    waits for its RELOAD. A later OFFLOAD waits for a forward after that instruction, and so may reuse the slot.
    """
    begins, ends = dict[_Cell, int](), dict[_Cell, int]()
    for index, part in enumerate(instructions_of(program.streams[rank])):
        if part.op is Op.OFFLOAD:
            begins[part.stage, part.microbatch] = index
        elif part.op in COMPUTE or part.op is Op.RECOMPUTE:
            ends |= {(key.stage, key.microbatch): index for key in part.waits if key.op is Op.RELOAD}
    if not begins:
        return Arena({}, (0, 0), (0, 0))
    cells, (first, last) = list(begins), np.array([(begin, ends[cell]) for cell, begin in begins.items()]).T
    apart = (first[:, None] < last) & (first < last[:, None])
    sizes = [np.array([-(-slots[stage][side] // ALIGNMENT) * ALIGNMENT for stage, _ in cells]) for side in (0, 1)]
    offsets = [first_fit(each, apart) for each in sizes]
    layouts = zip(offsets, sizes, strict=True)
    found = ((int((at + size).max()), int(most_in_use(first, last, size))) for at, size in layouts)
    totals, bounds = zip(*found, strict=True)
    pairs = zip(*(each.tolist() for each in offsets), strict=True)
    return Arena(dict(zip(cells, pairs, strict=True)), totals, bounds)
