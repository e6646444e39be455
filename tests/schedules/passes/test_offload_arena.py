"""Slots of offloaded activations that are in use at the same time never overlap, and take little more memory than the
peak in use."""

from __future__ import annotations

import numpy as np
import pytest

from pentad.schedules.compiler import compile_program
from pentad.schedules.ir.instruction import Key, Op, instructions_of
from pentad.schedules.ir.program import Program
from pentad.schedules.passes.offload_arena import Arena, arena
from pentad.schedules.passes.offload_cut import ALIGNMENT, cut
from pentad.schedules.passes.zero_buffers import first_fit, overlapping
from pentad.schedules.spec.schedule_spec import MemoryOptions

SIZES = [("gpipe", 2, 4), ("1f1b", 4, 8), ("zb-h2", 2, 6), ("zb-v", 2, 6), ("dualpipe", 2, 4), ("looped-bfs", 2, 4)]


def compiled(name: str, p: int, m: int, *, recompute: bool = False) -> Program:
    stages = compile_program(name, p, m).stages
    every = frozenset(range(3 * stages))
    options = MemoryOptions(units=(3,) * stages, offload=every, recompute=every if recompute else frozenset())
    return compile_program(name, p, m, memory_options=options)


def lifetimes(program: Program, rank: int) -> dict[tuple[int, int], tuple[int, int]]:
    """(stage, microbatch) -> positions in the stream of its OFFLOAD and of what waits for its RELOAD."""
    position = {part.key: index for index, part in enumerate(instructions_of(program.streams[rank]))}
    reader = {
        key[1:]: index
        for index, part in enumerate(instructions_of(program.streams[rank]))
        for key in part.waits
        if key.op is Op.RELOAD
    }
    return {cell: (position[Key(Op.OFFLOAD, *cell)], end) for cell, end in reader.items()}


@pytest.mark.sampled(7)
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(("name", "p", "m"), SIZES)
def test_no_two_activations_share_an_address_at_one_time(name: str, p: int, m: int, recompute: bool) -> None:
    program = compiled(name, p, m, recompute=recompute)
    slots = [(7000 - 1000 * (stage % 4), 512 * (stage % 3)) for stage in range(program.stages)]
    for rank in range(p):
        found, lives = arena(program, rank, slots), lifetimes(program, rank)
        assert found.offsets.keys() == lives.keys() != set()
        for side in (0, 1):
            spans = {cell: (at[side], at[side] + slots[cell[0]][side]) for cell, at in found.offsets.items()}
            assert max(end for _, end in spans.values()) <= found.bytes[side]
            for a in spans:
                for b in spans:
                    lives_meet = max(lives[a][0], lives[b][0]) < min(lives[a][1], lives[b][1])
                    if a != b and lives_meet:
                        assert max(spans[a][0], spans[b][0]) >= min(spans[a][1], spans[b][1])
            times = [sum(slots[cell[0]][side] for cell, (a, b) in lives.items() if a <= t < b) for t in range(9999)]
            assert max(times) <= found.bounds[side] <= found.bytes[side] <= 1.25 * found.bounds[side]
            assert found.bounds[side] - max(times) < ALIGNMENT * len(lives)


@pytest.mark.parametrize("name", ["1f1b", "zb-v", "looped-bfs"])
def test_activations_of_equal_size_lie_where_first_fit_puts_them(name: str) -> None:
    """Slots for equal sizes are found without comparing all lifetimes."""
    program = compiled(name, 2, 6)
    for rank in range(2):
        slots = [(2 * ALIGNMENT, ALIGNMENT)] * program.stages
        equal, lives = arena(program, rank, slots), lifetimes(program, rank)
        first, last = np.array([lives[cell] for cell in equal.offsets]).T
        overlap = (first[:, None] < last) & (first < last[:, None])
        apart = [sum(1 << other for other in np.flatnonzero(row).tolist()) for row in overlap]
        assert overlapping(first, last) == apart
        for side, size in enumerate(slots[0]):
            expected = first_fit(np.full(len(first), size), apart)
            assert [at[side] for at in equal.offsets.values()] == expected.tolist()


def test_a_rank_without_copies_needs_no_memory() -> None:
    assert arena(compile_program("1f1b", 2, 4), 0, ()) == Arena({}, (0, 0), (0, 0))


@pytest.mark.parametrize("seed", range(10))
def test_a_share_of_the_bytes_is_cut_from_one_tensor_at_most(seed: int) -> None:
    rng = np.random.default_rng(seed)
    sizes, fraction = (rng.integers(1, 60, 8) * 256).tolist(), float(rng.random())
    found = cut(sizes, fraction)
    assert 0 <= fraction * sum(sizes) - found.bytes < ALIGNMENT
    partial = [size - moved for size, moved in zip(sizes, found.moved, strict=True) if 0 < moved < size]
    assert partial == ([found.rest] if found.rest else [])
    assert found.taken == sum(size for size, moved in zip(sizes, found.moved, strict=True) if moved)
    all_stays = cut(sizes, fraction, found.rest - 1)
    assert cut(sizes, fraction, found.rest) == found and all_stays.rest == 0
    assert all(moved in (0, size) for size, moved in zip(sizes, all_stays.moved, strict=True))
    assert cut(sizes, 0.0).bytes == 0 and cut(sizes, 1.0) == (tuple(sizes), 0)
