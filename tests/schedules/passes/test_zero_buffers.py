"""Weights and gradients in use at the same time never share memory, whatever the sizes of their stages."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pentad.schedules.compiler import compile_program
from pentad.schedules.ir.instruction import Key, Op, instructions_of
from pentad.schedules.ir.program import Program
from pentad.schedules.passes.zero_buffers import (
    bits_of,
    gradient_pool,
    gradient_sums,
    sharded_stages,
    stages_sharing_memory,
    weight_pool,
    weight_sizes,
)
from pentad.schedules.spec.schedule_spec import MemoryOptions

SIZES = st.lists(st.sampled_from([0, 64, 128, 448, 1024]), min_size=8, max_size=8)
CASES = [("1f1b", 2, (4, 4)), ("zb-h2", 2, (3, 5)), ("1f1b", 1, (8,)), ("interleaved", 2, (2, 2, 2, 2))]


def compiled(name: str, ranks: int, units: tuple[int, ...], sizes: list[int], gathered: int | None) -> Program:
    by_unit = tuple((size, size // 2, 0, 0) for size in sizes)
    options = MemoryOptions(zero=3, max_gathered=gathered, units=units, reduce=None, sizes=by_unit)
    return compile_program(name, ranks, 4, replicas=2, memory_options=options)


@pytest.mark.parametrize("gathered", [2, *(pytest.param(each, marks=pytest.mark.slow) for each in (3, None))])
@pytest.mark.parametrize(("name", "ranks", "units"), CASES)
@settings(max_examples=6)
@given(sizes=SIZES)
def test_gathered_weights_never_share_elements(name, ranks, units, gathered, sizes: list[int]) -> None:
    """And the pool is at most twice as large as the most weights gathered at once."""
    program = compiled(name, ranks, units, sizes, gathered)
    for rank, stream in enumerate(program.streams):
        pool = weight_pool(program, rank, sharded_stages(program, rank))
        live, peak = dict[tuple[int, int], tuple[int, int]](), 0
        for part in instructions_of(stream):
            place = part.stage, part.microbatch
            if part.op is Op.ALL_GATHER:
                start = pool.offsets[place][0]
                live[place] = start, start + weight_sizes(program, part.stage)[0]
                for (a, b), (c, d) in combinations(live.values(), 2):
                    assert b <= c or d <= a or a == b or c == d
                peak = max(peak, sum(end - start for start, end in live.values()))
            elif part.op is Op.FREE:
                del live[place]
        assert peak <= pool.elements[0] <= 2 * peak


@pytest.mark.parametrize(("name", "ranks", "units"), CASES)
@settings(max_examples=6)
@given(sizes=SIZES)
def test_gradients_that_accumulate_together_never_share_elements(name, ranks, units, sizes: list[int]) -> None:
    """Nor with those of the stage that was reduced just before, unless the sum waits for it."""
    program = compiled(name, ranks, units, sizes, 2)
    for rank, stream in enumerate(program.streams):
        sums, accumulating = gradient_sums(program, rank), set[int]()
        meeting = {
            stage: {sums.stages[place] for place in bits_of(others)}
            for stage, others in zip(sums.stages, stages_sharing_memory(program, sums), strict=True)
        }
        reduced = dict[int, Key]()
        for part in instructions_of(stream):
            if part.op is Op.REDUCE_SCATTER:
                accumulating.discard(part.stage)
                reduced.pop(part.stage, None)
                reduced[part.stage] = part.key
            elif part.op in (Op.W, Op.BW) and part.stage not in accumulating:
                assert not meeting[part.stage] & accumulating
                met = [key for stage, key in reduced.items() if stage in meeting[part.stage]]
                assert not met or met[-1] in part.waits
                accumulating.add(part.stage)


@pytest.mark.parametrize("layers", [3, 4, 5, 6])
def test_where_units_follow_each_other_pools_hold_two_neighbours(layers: int) -> None:
    """Whether an even or an odd number of layers lies between a large embedding and a large head."""
    sizes = [448, *[384] * layers, 512]
    program = compiled("1f1b", 1, (len(sizes),), sizes, 2)
    pools = weight_pool(program, 0, sharded_stages(program, 0)), gradient_pool(program, 0)
    assert [pool.elements[:2] for pool in pools] == [(512 + 384, 256 + 192)] * 2
