"""Pass: where the weights that ZeRO gathers, and the gradients that it reduces, lie in memory that stages share.

A rank has one pool for the gathered weights of its stages (ZeRO-3) and one for their gradients (ZeRO-2 and 3). Their
lifetimes are known from the program, so addresses are assigned once, by first fit, largest first: the layout is that of
workers, estimates and the proof alike. Parameters of different kinds (all but experts, experts, and the frozen ones of
both) have pools of their own, each with the same lifetimes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import NamedTuple

import numpy as np

from pentad.schedules.ir.columns import Array, op_mask
from pentad.schedules.ir.instruction import Key, Op, instructions_of
from pentad.schedules.ir.lookup import IS_WEIGHT
from pentad.schedules.ir.program import Program
from pentad.schedules.ir.rewrite import insert
from pentad.schedules.passes.zero import keys_of, rows_of_rank

_IS_SCATTER = op_mask({Op.REDUCE_SCATTER})
Place = tuple[int, int]  # stage, number of the gather, which is 0 for gradients
EQUAL_SIZES = (1,)  # of every stage, if the program does not say them
TRAINED_KINDS = 2  # come before the frozen ones


class Pool(NamedTuple):
    """`offsets[place]` are the first elements of a stage's parameters in the pool, by kind, and `elements` the lengths
    of the pool, by kind."""

    offsets: dict[Place, tuple[int, ...]]
    elements: tuple[int, ...]


def weight_pool(program: Program, rank: int, sharded: set[int]) -> Pool:
    """For the gathers of `sharded` stages on a rank, each from ALL_GATHER to FREE."""
    begins, ends = dict[Place, int](), dict[Place, int]()
    for index, part in enumerate(instructions_of(program.streams[rank])):
        if part.op in (Op.ALL_GATHER, Op.FREE) and part.stage in sharded:
            (begins if part.op is Op.ALL_GATHER else ends)[part.stage, part.microbatch] = index
    first = np.array(list(begins.values()), np.int64)
    last = np.array([ends.get(place, program.columns.rows) for place in begins], np.int64)
    return _pool(program, list(begins), (first[:, None] < last) & (first < last[:, None]))


def gradient_pool(program: Program, rank: int) -> Pool:
    """For the gradients of the stages that a rank reduces. A stage has one place for the whole step, and uses it from
    the first W of a sum to the REDUCE_SCATTER.

    It is apart from those of stages that accumulate at the same time, and from that of the stage reduced just before:
    its REDUCE_SCATTER then runs beside this one's W. A DualPipe stage shares with none, because waiting for one could
    block its mirror.
    """
    numbers, running, reduced = dict[int, int](), set[int](), -1  # by stage, in the order of their first W
    held = sharded_stages(program, rank)
    apart = np.zeros((len(held), len(held)), bool)
    for begins, key in _accumulations(program, rank):
        if not begins:
            running.discard(key.stage)
            reduced = key.stage
            continue
        others = set(running)
        if key.stage not in numbers:
            numbers[key.stage] = len(numbers)
            others |= {reduced} & numbers.keys()
        for other in others:
            apart[numbers[key.stage], numbers[other]] = apart[numbers[other], numbers[key.stage]] = True
        running.add(key.stage)
    for stage, number in numbers.items():
        if len(program.holders(stage)) > 1:
            apart[number], apart[:, number] = True, True
    return _pool(program, [(stage, 0) for stage in numbers], apart, trained=True)


def longest(pools: Sequence[Pool]) -> tuple[int, ...]:
    """The elements, by kind, of memory for the pools of several programs, which run one after another."""
    return tuple(max(each) for each in zip_longest(*(pool.elements for pool in pools), fillvalue=0))


def _pool(program: Program, places: list[Place], apart: Array, *, trained: bool = False) -> Pool:
    """Largest first, each at the lowest address where it meets none of those that it has to be `apart` from."""
    if not places:
        return Pool({}, ())
    kinds = TRAINED_KINDS if trained else None
    sizes = np.array([stage_sizes(program, stage)[:kinds] for stage, _ in places], np.int64)
    offsets = np.stack([first_fit(each, apart) for each in sizes.T], axis=1)
    elements = tuple((offsets + sizes).max(axis=0).tolist())
    return Pool(dict(zip(places, map(tuple, offsets.tolist()), strict=True)), elements)


def first_fit(sizes: Array, apart: Array) -> Array:
    """Offsets of pieces of memory: the largest first, each as low as it overlaps with none of those `apart`."""
    if not sizes.any():
        return np.zeros_like(sizes)
    offsets = np.full(len(sizes), -1)
    for index in np.argsort(-sizes, kind="stable"):
        others = np.flatnonzero(apart[index] & (offsets >= 0))
        others = others[np.argsort(offsets[others])]
        gaps = np.concatenate(([0], np.maximum.accumulate(offsets[others] + sizes[others])))
        fits = np.append(offsets[others], np.iinfo(np.int64).max) - gaps >= sizes[index]
        offsets[index] = gaps[np.argmax(fits)]
    return offsets


def stage_sizes(program: Program, stage: int) -> tuple[int, ...]:
    """Elements of a stage's parameters, by kind."""
    return program.sizes[stage] if program.sizes else EQUAL_SIZES


def is_double_buffered(program: Program) -> bool:
    """Whether no rank has gradients of more than two of its stages at once."""
    for rank in range(program.ranks):
        pool = gradient_pool(program, rank)
        by_kind = zip(*(stage_sizes(program, stage)[:TRAINED_KINDS] for stage, _ in pool.offsets), strict=True)
        largest_two = [sum(sorted(sizes)[-2:]) for sizes in by_kind]
        if any(elements > two for elements, two in zip(pool.elements, largest_two, strict=True)):
            return False
    return True


def gradient_waits(program: Program, rank: int) -> Iterator[tuple[Key, Key]]:
    """Which first W of a sum has to wait for which REDUCE_SCATTER: the last of those whose places meet its own, and
    the last of its own stage, whose sum it continues."""
    pool, reduced = gradient_pool(program, rank), dict[int, Key]()  # by stage, the last one last
    for begins, key in _accumulations(program, rank):
        if not begins:
            if len(program.holders(key.stage)) == 1:
                reduced.pop(key.stage, None)
                reduced[key.stage] = key
            continue
        meeting = [other for other in reduced if other == key.stage or meet(program, pool, key.stage, other)]
        before = reduced.get(meeting[-1]) if meeting else None, reduced.get(key.stage)
        yield from ((key, each) for each in dict.fromkeys(before) if each is not None)


def meet(program: Program, pool: Pool, stage: int, other: int) -> bool:
    """Whether the gradients of two stages have elements in common in a rank's pool."""
    parts = zip(pool.offsets[stage, 0], stage_sizes(program, stage), strict=False)
    others = zip(pool.offsets[other, 0], stage_sizes(program, other), strict=False)
    return any(max(a, b) < min(a + size, b + length) for (a, size), (b, length) in zip(parts, others, strict=True))


def _accumulations(program: Program, rank: int) -> Iterator[tuple[bool, Key]]:
    """Of each sum of gradients on a rank in turn the first W, with True, and the REDUCE_SCATTER."""
    sharded, running = sharded_stages(program, rank), set[int]()
    rows = rows_of_rank(program, rank, IS_WEIGHT | _IS_SCATTER)
    for key in keys_of(program.columns, rows):
        if key.op is Op.REDUCE_SCATTER:
            running.discard(key.stage)
            yield False, key
        elif key.stage in sharded and key.stage not in running:
            running.add(key.stage)
            yield True, key


def sharded_stages(program: Program, rank: int) -> set[int]:
    """Stages of which a rank holds a ZeRO shard."""
    return set(program.columns.stage[rows_of_rank(program, rank, _IS_SCATTER)].tolist())


def add_gradient_buffer_waits(program: Program) -> Program:
    """The waits of `gradient_waits`."""
    ranks = range(program.ranks)
    return insert(program, (), [(rank, *wait) for rank in ranks for wait in gradient_waits(program, rank)])
