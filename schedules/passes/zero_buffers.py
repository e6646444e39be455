"""Pass: lays out the weights that ZeRO gathers, and the gradients that it reduces, in memory that stages share.

A rank has one pool for the gathered weights of its stages (ZeRO-3) and one for their gradients (ZeRO-2 and 3). Their
lifetimes are known from the program, so addresses are assigned once: workers, estimates and the proof use the same
layout. Each kind of parameters (all but experts, experts, and the frozen ones of both) has pools of its own, with the
same lifetimes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import NamedTuple

import numpy as np

from pentad.schedules.ir.columns import CODE, Array, op_mask
from pentad.schedules.ir.instruction import Op
from pentad.schedules.ir.lookup import IS_WEIGHT
from pentad.schedules.ir.program import Program
from pentad.schedules.passes.zero import rows_of_rank

_IS_SCATTER, _IS_GATHER_OR_FREE = op_mask({Op.REDUCE_SCATTER}), op_mask({Op.ALL_GATHER, Op.FREE})
_GATHER = CODE[Op.ALL_GATHER]
Place = tuple[int, int]  # stage, number of the gather, which is 0 for gradients
EQUAL_SIZES = (1,)  # of every stage, if the program has no sizes
TRAINED_KINDS = 2  # which come before the frozen ones
WEIGHT_KINDS = 4  # after which a program's sizes may list those of gradients


class Pool(NamedTuple):
    """`offsets[place]` are the elements at which a stage's parameters start in the pool, by kind, and `elements` the
    lengths of the pool, by kind."""

    offsets: dict[Place, tuple[int, ...]]
    elements: tuple[int, ...]


def weight_pool(program: Program, rank: int, sharded: set[int]) -> Pool:
    """The pool for a rank's gathers of `sharded` stages, each in use from ALL_GATHER to FREE.

    All gathers of a stage share one place if that takes no more memory than the most in use at once; otherwise each has
    its own."""
    stages, numbers, first, last = _gathered(program, rank, sharded)
    apart, places = overlapping(first, last), list(zip(stages.tolist(), numbers.tolist(), strict=True))
    own, others = dict[int, int](), dict[int, int]()  # by stage: its gathers, and all that overlap with one of them
    for at, (stage, _) in enumerate(places):
        own[stage] = own.get(stage, 0) | 1 << at
        others[stage] = others.get(stage, 0) | apart[at]
    held = sorted(own)
    of_stages = [sum(1 << k for k, stage in enumerate(held) if others[each] & own[stage]) for each in held]
    pool = _laid_out(program, [(stage, 0) for stage in held], of_stages)
    if pool.elements == _most_gathered(program, stages, first, last):
        return Pool({place: pool.offsets[place[0], 0] for place in places}, pool.elements)
    return _laid_out(program, places, apart)


def _gathered(program: Program, rank: int, sharded: set[int]) -> tuple[Array, Array, Array, Array]:
    """(stage, number, row of ALL_GATHER, row of FREE or the end) of every gather, in order."""
    columns, rows = program.columns, rows_of_rank(program, rank, _IS_GATHER_OR_FREE)
    rows = rows[np.isin(columns.stage[rows], list(sharded))]
    rows = rows[np.lexsort((rows, columns.microbatch[rows], columns.stage[rows]))]  # each FREE after its gather
    begins = columns.op[rows] == _GATHER
    last = np.append(np.where(begins, columns.rows, rows), columns.rows)[1:][begins]
    order = np.argsort(rows[begins])
    first, last = rows[begins][order], last[order]
    return columns.stage[first], columns.microbatch[first], first, last


def overlapping(first: Array, last: Array) -> list[int]:
    """For each lifetime, sorted by begin, those that overlap with it, including itself, as the bits of a number. What
    ends at an index does not overlap with what begins there."""
    found, ended, ends = list[int](), 0, np.argsort(last).tolist()[::-1]
    begun, last_of = np.searchsorted(first, last).tolist(), last.tolist()  # how many begin before each ends
    for begin, count in zip(first.tolist(), begun, strict=True):
        while ends and last_of[ends[-1]] <= begin:
            ended |= 1 << ends.pop()
        found.append(((1 << count) - 1) & ~ended)
    return found


def _most_gathered(program: Program, stages: Array, first: Array, last: Array) -> tuple[int, ...]:
    """The most elements that are gathered at once, by kind."""
    if not len(stages):
        return ()
    held, index = np.unique(stages, return_inverse=True)
    sizes = np.array([weight_sizes(program, stage) for stage in held.tolist()], np.int64)[index]
    return tuple(most_in_use(first, last, sizes).tolist())


def most_in_use(first: Array, last: Array, sizes: Array) -> Array:
    """The most in use at once, by column of `sizes`; what ends at an index is free for what begins there."""
    order = np.argsort(np.concatenate((last, first)), kind="stable")
    found: Array = np.concatenate((-sizes, sizes))[order].cumsum(axis=0).max(axis=0)
    return found


class GradientSums(NamedTuple):
    """The events of a rank's gradient sums, sorted by row: the first W of a sum, where it `begins`, and its
    REDUCE_SCATTER, which alternate for each stage. `stage_index` is the index of the event's stage in `stages`, which
    are in the order of their first W; the bits of `running` are the indices of the stages whose sums are under way just
    before the event."""

    stages: list[int]
    stage_index: Array
    begins: Array
    row: Array
    running: Array


def gradient_sums(program: Program, rank: int) -> GradientSums:
    """The gradient sums of the stages that a rank reduces."""
    columns, rows = program.columns, rows_of_rank(program, rank, IS_WEIGHT | _IS_SCATTER)
    rows = rows[np.isin(columns.stage[rows], list(sharded_stages(program, rank)))]
    by_stage = rows[np.argsort(columns.stage[rows], kind="stable")]
    scatters, stage = _IS_SCATTER[columns.op[by_stage]], columns.stage[by_stage]
    follows_scatter = np.ones(len(rows), bool)
    follows_scatter[1:] = scatters[:-1] | (stage[1:] != stage[:-1])
    row = np.sort(by_stage[scatters ^ follows_scatter])
    stages, first, by_number = np.unique(columns.stage[row], return_index=True, return_inverse=True)
    order = np.argsort(first)
    index = np.argsort(order)[by_number]
    bits = np.array([1 << k for k in range(len(stages))], object)[index]
    running = np.bitwise_xor.accumulate(bits) ^ bits  # begin and end alternate, so a bit is set in between
    return GradientSums(stages[order].tolist(), index, ~_IS_SCATTER[columns.op[row]], row, running)


def gradient_pool(program: Program, rank: int) -> Pool:
    """The pool for the gradients of the stages that a rank reduces. A stage has one place for the whole step, and uses
    it from the first W of a sum to the REDUCE_SCATTER.

    Its place is apart from those of stages that accumulate at the same time, and from that of the stage reduced just
    before, whose REDUCE_SCATTER runs beside this one's W.
    """
    return _gradient_pool(program, gradient_sums(program, rank))


def _gradient_pool(program: Program, sums: GradientSums) -> Pool:
    apart = [1 << k for k in range(len(sums.stages))]  # bits, as in `overlapping`
    meetings = set(zip(sums.stage_index[sums.begins].tolist(), sums.running[sums.begins].tolist(), strict=True))
    _, first = np.unique(sums.stage_index, return_index=True)
    reduced = np.maximum.accumulate(np.where(sums.begins, -1, np.arange(len(sums.row))))[first]
    meetings |= {(k, 1 << int(sums.stage_index[event])) for k, event in enumerate(reduced.tolist()) if event >= 0}
    for k, others in meetings:
        apart[k] |= others
        for other in bits_of(others):
            apart[other] |= 1 << k
    return _laid_out(program, [(stage, 0) for stage in sums.stages], apart, trained=True)


def longest(pools: Sequence[Pool]) -> tuple[int, ...]:
    """The elements, by kind, that suffice for the pools of several programs that run one after another."""
    return tuple(max(each) for each in zip_longest(*(pool.elements for pool in pools), fillvalue=0))


def _laid_out(program: Program, places: list[Place], apart: list[int], *, trained: bool = False) -> Pool:
    """For each kind, the smaller of two layouts: largest first, each at the lowest address where it overlaps with none
    that it has to be `apart` from (bits, as in `overlapping`); or, if the places form two groups within which none have
    to be apart, one group at the start and the other at the end of as much memory as two places that have to be apart
    take at most."""
    if not places:
        return Pool({}, ())
    sizes_of = gradient_sizes if trained else weight_sizes
    sizes = np.array([sizes_of(program, stage) for stage, _ in places], np.int64)
    turns, pairs = _two_turns(apart)
    columns = list[Array]()
    for each in sizes.T:
        layouts = [first_fit(each, apart)]
        if turns is not None:
            layouts.append(np.where(turns, each[pairs].sum(axis=0).max(initial=each.max()) - each, 0))
        columns.append(min(layouts, key=lambda offsets: int((offsets + each).max())))
    offsets = np.stack(columns, axis=1)
    elements = tuple((offsets + sizes).max(axis=0).tolist())
    return Pool(dict(zip(places, map(tuple, offsets.tolist()), strict=True)), elements)


def _two_turns(apart: list[int]) -> tuple[Array | None, Array]:
    """[places] bool in which places that have to be apart differ, or None if that is impossible; and [2, pairs] the
    pairs of such places."""
    turns, pairs = [0, 0], list[tuple[int, int]]()  # the places of each turn, as bits
    for start in range(len(apart)):
        turn, level = 0, 1 << start & ~(turns[0] | turns[1])
        while level:
            turns[turn] |= level
            others = 0
            for place in bits_of(level):
                found = apart[place] & ~(1 << place)
                pairs += [(place, other) for other in bits_of(found & ~turns[1 - turn])]
                others |= found
            if others & turns[turn]:
                return None, np.zeros((2, 0), int)
            turn, level = 1 - turn, others & ~turns[1 - turn]
    is_second = np.zeros(len(apart), bool)
    is_second[list(bits_of(turns[1]))] = True
    return is_second, np.array(pairs, int).reshape(-1, 2).T


def bits_of(number: int) -> Iterator[int]:
    """The positions of the one bits, highest first."""
    while number:
        position = number.bit_length() - 1
        yield position
        number ^= 1 << position


def first_fit(sizes: Array, apart: list[int]) -> Array:
    """Offsets of pieces of memory, placed largest first, each at the lowest offset where it overlaps with none that it
    has to be `apart` from (bits, as in `overlapping`)."""
    offsets = np.zeros_like(sizes)
    if not sizes.any():
        return offsets
    order = np.argsort(-sizes, kind="stable")
    if apart == [(1 << len(apart)) - 1] * len(apart):
        offsets[order] = (np.cumsum(sizes[order]) - sizes[order]) * (sizes[order] > 0)
        return offsets
    places, placed = list[tuple[int, int]](), list[int]()  # by offset and size: pieces there, as the bits of a number
    for index in order.tolist():
        size, lowest, others = int(sizes[index]), 0, apart[index]
        for (offset, other), pieces in zip(places, placed, strict=True):
            if others & pieces:
                if offset - lowest >= size:
                    break
                if offset + other > lowest:  # max() would take most of the time
                    lowest = offset + other
        offsets[index], place = lowest, (lowest, size)
        at = bisect_left(places, place)
        if places[at : at + 1] != [place]:
            places.insert(at, place)
            placed.insert(at, 0)
        placed[at] |= 1 << index
    return offsets


def weight_sizes(program: Program, stage: int) -> tuple[int, ...]:
    """Elements of a stage's full weights, by kind."""
    return program.sizes[stage][:WEIGHT_KINDS] if program.sizes else EQUAL_SIZES


def gradient_sizes(program: Program, stage: int) -> tuple[int, ...]:
    """Elements of a stage's full gradients, by kind: those of the trained weights, unless the program lists both."""
    sizes = weight_sizes(program, stage)
    return (program.sizes[stage][WEIGHT_KINDS:] if program.sizes else ()) or sizes[:TRAINED_KINDS]


def is_double_buffered(program: Program) -> bool:
    """Whether no rank has gradients of more than two of its stages at once."""
    for rank in range(program.ranks):
        pool = gradient_pool(program, rank)
        by_kind = zip(*(gradient_sizes(program, stage) for stage, _ in pool.offsets), strict=True)
        largest_two = [sum(sorted(sizes)[-2:]) for sizes in by_kind]
        if any(elements > two for elements, two in zip(pool.elements, largest_two, strict=True)):
            return False
    return True


def gradient_waits(sums: GradientSums, sharing: list[int]) -> Array:
    """[2, waits] rows: which first W of a sum waits for which REDUCE_SCATTER. It waits for the last one whose place
    overlaps with its own (`sharing` is from `stages_sharing_memory`), and for the last one of its own stage, whose sum
    it continues."""
    found, reduced = [np.zeros((2, 0), int)], np.where(sums.begins, -1, sums.row)
    for k, others in enumerate(sharing):
        is_own, shares = sums.stage_index == k, np.array([others >> other & 1 for other in range(len(sharing))], bool)
        begins = sums.begins & is_own
        own, last = (
            np.maximum.accumulate(np.where(of, reduced, -1))[begins] for of in (is_own, shares[sums.stage_index])
        )
        for waited, is_wait in ((last, last >= 0), (own, (own >= 0) & (own != last))):
            found.append(np.array((sums.row[begins][is_wait], waited[is_wait])))
    return np.concatenate(found, axis=1)


def stages_sharing_memory(program: Program, sums: GradientSums) -> list[int]:
    """For each stage of a rank's sums, the stages that share memory with it in the gradient pool, including itself, as
    the bits of a number."""
    begins = np.array([*_gradient_pool(program, sums).offsets.values()])
    ends = begins + np.array([gradient_sizes(program, stage) for stage in sums.stages]).reshape(begins.shape)
    meet = (np.maximum(begins[:, None], begins) < np.minimum(ends[:, None], ends)).any(axis=-1)
    return [sum(1 << int(other) for other in np.flatnonzero(row)) | 1 << k for k, row in enumerate(meet)]


def sharded_stages(program: Program, rank: int) -> set[int]:
    """Stages of which a rank holds a ZeRO shard."""
    return set(program.columns.stage[rows_of_rank(program, rank, _IS_SCATTER)].tolist())


def add_gradient_buffer_waits(program: Program) -> Program:
    """Adds the waits of `gradient_waits`."""
    sums = [gradient_sums(program, rank) for rank in range(program.ranks)]
    found = [gradient_waits(each, stages_sharing_memory(program, each)) for each in sums]
    waiting, waited = np.concatenate(found, axis=1)
    return program.with_streams(program.columns.with_waits(waiting, *program.columns.keys(waited)))
