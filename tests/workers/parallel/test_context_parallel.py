"""Attention over the ranks of a cp group: what one process gives, whatever the variant and however rows are packed."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from closeness import relative_error
from context_ranks import Case, Ranks, run_rank

from pentad.kernels.attention.attention import attention, attention_backward
from pentad.schedules.spec.cp_layout import CpMethod

pytestmark = pytest.mark.timeout(60)
VARIANTS: tuple[CpMethod, ...] = ("ring", "all_gather", "ulysses")
BOUNDS = {torch.float64: 1e-10, torch.float32: 1e-5}
# of 3 rows of 32 positions: across all, on the borders of chunks, inside one chunk, single positions
PACKED = ((0, 8, 16, 24), (0, 3, 4, 5, 7, 19), (0, 30, 31))
SHAPES = {
    "equal heads": Case(2, "ring", batch=1, heads=4, kv_heads=4),
    "grouped, odd batch, other scale": Case(2, "ring", batch=3, heads=8, kv_heads=2, scale=0.17),
    "one key head": Case(2, "ring", batch=2, heads=4, kv_heads=1, width=6, value=6),
    "narrow values": Case(2, "ring", batch=1, heads=4, kv_heads=4, width=12, value=8),
    "packed": Case(2, "ring", batch=3, heads=4, kv_heads=2, documents=PACKED),
    "packed, narrow values": Case(2, "ring", batch=3, heads=4, kv_heads=4, width=12, value=4, documents=PACKED),
    "packed, rows alike": Case(2, "ring", batch=3, documents=((0, 17), (0, 17), (0,)), length=48),
    "hardly a document of two positions": Case(2, "ring", batch=1, documents=((0, *range(3, 32)),)),
}


@pytest.fixture(scope="module")
def ranks():
    made = Ranks(4)
    yield made
    made.stop()


def agrees(ranks: Ranks, case: Case, bound: float) -> None:
    answers = ranks.run(case)
    for found, expected in zip(case.joined([a.parts for a in answers]), case.expected(), strict=True):
        assert relative_error(found, expected) < bound
    assert all(answer.rooms <= 2 for answer in answers)  # keys of two ranks at most are held besides one's own


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("cp", "variant"), list(product((2, 4), VARIANTS)))
def test_ranks_give_what_the_whole_sequence_gives(ranks, cp, variant, shape, dtype):
    agrees(ranks, replace(SHAPES[shape], cp=cp, variant=variant, dtype=dtype), BOUNDS[dtype])


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_one_rank_gives_what_the_definition_says(variant, shape, dtype):
    case = replace(SHAPES[shape], cp=1, variant=variant, dtype=dtype)
    parts = run_rank(case, 0, None, torch.device("cpu")).parts
    for found, expected in zip(parts, case.expected(), strict=True):
        assert relative_error(found, expected) < BOUNDS[dtype]


@pytest.mark.parametrize(("shape", "variant"), list(product(("grouped, odd batch, other scale", "packed"), VARIANTS)))
def test_sixteen_bits_suffice(ranks, shape, variant):
    agrees(ranks, replace(SHAPES[shape], cp=4, variant=variant, dtype=torch.bfloat16), 1e-2)


def test_one_rank_is_plain_attention_to_the_bit():
    case = Case(1, "ring", batch=2, dtype=torch.float32)
    q, k, v, dout = (x.contiguous() for x in case.inputs())
    out, saved = attention(q, k, v, deterministic=True)
    expected = [out, *attention_backward(dout, saved)]
    found = run_rank(case, 0, None, torch.device("cpu")).parts
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("variant", VARIANTS)
def test_runs_repeat_bit_by_bit(ranks, variant):
    case = Case(4, variant, batch=3, documents=PACKED, dtype=torch.float32, times=3)
    assert all(answer.same for answer in ranks.run(case))


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("variant", VARIANTS)
def test_any_packing_is_exact(ranks, variant, seed):
    made = torch.Generator().manual_seed(seed)
    starts = [torch.randperm(39, generator=made)[: 4 * (seed + row) % 13] + 1 for row in range(2)]
    documents = tuple((0, *sorted(each.tolist())) for each in starts)
    agrees(ranks, Case(4, variant, batch=2, length=40, documents=documents, seed=seed), 1e-10)


def test_keys_and_gradients_travel_while_blocks_are_computed(ranks):
    step = ["keys", "block", "wait"]
    forward = [*3 * step, "block"]
    back = [
        *step,
        "gradients",
        *2 * ["keys", "block", "wait", "wait", "gradients"],
        "block",
        "wait",
        "gradients",
        "wait",
    ]
    for answer in ranks.run(Case(4, "ring")):
        assert answer.log == [*forward, "backward", *back]


@pytest.mark.parametrize("variant", ["ring", "all_gather"])
def test_what_is_kept_for_the_way_back_is_a_rank_s_share(ranks, variant):
    case = Case(4, variant, batch=3, heads=8, kv_heads=2, length=64, width=12, value=8)
    whole = 3 * 64 * (8 * (12 + 8 + 1) + 2 * (12 + 8))
    assert [answer.kept for answer in ranks.run(case)] == 4 * [whole // 4]
