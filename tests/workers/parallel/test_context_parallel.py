"""Context-parallel attention equals plain attention, by every method and for any packing of documents."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, product

import pytest
import torch
from closeness import relative_error
from cp_ranks import Case, Ranks, document_indices, run_rank
from dense_attention import dense_attention
from hypothesis import given
from hypothesis import strategies as st

from pentad.kernels.attention.attention import attention, attention_backward
from pentad.kernels.attention.attention_reference import AttentionOptions, _visible
from pentad.schedules.spec.cp_layout import CpMethod, positions
from pentad.workers.parallel.document_mask import plan_steps

pytestmark = pytest.mark.timeout(60)
METHODS: tuple[CpMethod, ...] = ("ring", "all_gather", "ulysses")
BOUNDS = {torch.float64: 1e-10, torch.float32: 1e-5}
# Documents in 3 rows of 32 tokens: over several chunks, up to borders of chunks, inside a chunk, of one token.
PACKED = ((0, 8, 16, 24), (0, 3, 4, 5, 7, 19), (0, 30, 31))
SHAPES = {
    "equal heads": Case(2, "ring", batch=1, heads=4, kv_heads=4),
    "grouped heads, odd batch, other scale": Case(2, "ring", batch=3, heads=8, kv_heads=2, scale=0.17),
    "one key head": Case(2, "ring", batch=2, heads=4, kv_heads=1, head_dim=6, value_dim=6),
    "narrow values": Case(2, "ring", batch=1, heads=4, kv_heads=4, head_dim=12, value_dim=8),
    "packed": Case(2, "ring", batch=3, heads=4, kv_heads=2, documents=PACKED),
    "packed, narrow values": Case(2, "ring", batch=3, heads=4, kv_heads=4, head_dim=12, value_dim=4, documents=PACKED),
    "packed, equal rows": Case(2, "ring", batch=3, documents=((0, 17), (0, 17), (0,)), length=48),
    "documents of one token": Case(2, "ring", batch=1, documents=((0, *range(3, 32)),)),
}
WINDOWS = {
    "packed, window": Case(2, "ring", batch=3, heads=4, kv_heads=2, documents=PACKED, window=6),
    "window over several chunks": Case(2, "ring", batch=2, window=13, softcap=0.7),
    "window of two tokens": Case(2, "ring", window=2),
    "window of a chunk": Case(2, "ring", batch=2, window=8),
    "packed, soft cap": Case(2, "ring", batch=3, documents=PACKED, softcap=0.7),
    "sinks": Case(2, "ring", batch=2, heads=4, sinks=True),
    "packed, window, sinks": Case(2, "ring", batch=3, documents=PACKED, window=6, sinks=True),
}
ALWAYS = ("packed, window", "window over several chunks", "packed, window, sinks")
EACH_WINDOW = [name if name in ALWAYS else pytest.param(name, marks=pytest.mark.slow) for name in WINDOWS]


@pytest.fixture(scope="module")
def ranks():
    made = Ranks(4)
    yield made
    made.stop()


def assert_equals_plain_attention(ranks: Ranks, case: Case, bound: float) -> None:
    answers = ranks.run(case)
    for found, expected in zip(case.join([answer.parts for answer in answers]), case.expected(), strict=True):
        assert relative_error(found, expected) < bound
    assert all(answer.buffers <= 2 for answer in answers)  # key buffers, besides the rank's own


@pytest.mark.sampled(32)
@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("cp", "method"), list(product((2, 4), METHODS)))
def test_ranks_equal_plain_attention(ranks, cp, method, shape, dtype):
    assert_equals_plain_attention(ranks, replace(SHAPES[shape], cp=cp, method=method, dtype=dtype), BOUNDS[dtype])


@pytest.mark.sampled(9)
@pytest.mark.parametrize("shape", EACH_WINDOW)
@pytest.mark.parametrize(("cp", "method"), list(product((2, 4), METHODS)))
def test_windows_soft_caps_and_sinks_equal_plain_attention(ranks, cp, method, shape):
    assert_equals_plain_attention(ranks, replace(WINDOWS[shape], cp=cp, method=method), 1e-10)


@pytest.mark.parametrize("shape", EACH_WINDOW)
def test_one_rank_with_windows_soft_caps_and_sinks_equals_plain_attention(shape):
    case = replace(WINDOWS[shape], cp=1)
    parts = run_rank(case, 0, None, torch.device("cpu")).parts
    for found, expected in zip(case.join([parts]), case.expected(), strict=True):
        assert relative_error(found, expected) < 1e-10


@given(window=st.integers(2, 40), cp=st.integers(2, 4), starts=st.sets(st.integers(1, 47)))
def test_every_pair_within_a_window_is_in_one_block(window, cp, starts):
    """Over all ranks and steps the blocks make up the mask without overlap."""
    length, rows = 48, (0, *sorted(starts))
    index = document_indices((rows,), length)[0]
    place = torch.arange(length)
    distance = place[:, None] - place
    expected = (distance >= 0) & (distance < window) & (index[:, None] == index)
    found = torch.zeros(length, length, dtype=torch.int64)
    held = [torch.from_numpy(positions(length, cp, rank, "zigzag", rows)) for rank in range(cp)]
    for rank in range(cp):
        steps = plan_steps("ring", cp, rank, length, [rows], window=window)
        for step, blocks in enumerate(steps):
            for at in blocks:
                q, k = held[rank][at.queries], held[(rank - step) % cp][at.keys]
                options = AttentionOptions(at.causal, 1.0, True, at.lengths, window_left=at.window_left)
                if at.lengths is not None:  # as the flash kernels require
                    assert all(type(longest) is int for longest in at.lengths.max_seqlens)
                    assert at.lengths.cu_seqlens_q.is_contiguous() and at.lengths.cu_seqlens_k.is_contiguous()
                visible = _visible(torch.empty(1, 1, len(q), 1), torch.empty(1, 1, len(k), 1), options)
                found[q[:, None], k] += visible.view(len(q), len(k)).long()
    assert torch.equal(found, expected.long())


@pytest.mark.sampled(16)
@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("method", METHODS)
def test_one_rank_equals_plain_attention(method, shape, dtype):
    case = replace(SHAPES[shape], cp=1, method=method, dtype=dtype)
    parts = run_rank(case, 0, None, torch.device("cpu")).parts
    for found, expected in zip(parts, case.expected(), strict=True):
        assert relative_error(found, expected) < BOUNDS[dtype]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shape", ["grouped heads, odd batch, other scale", "packed"])
def test_sixteen_bits_suffice(ranks, shape, method):
    case = replace(SHAPES[shape], cp=4, method=method, dtype=torch.bfloat16)
    assert_equals_plain_attention(ranks, case, 1e-2)


def test_one_rank_has_the_bits_of_plain_attention():
    case = Case(1, "ring", batch=2, dtype=torch.float32)
    q, k, v, dout = (x.contiguous() for x in case.inputs())
    out, saved = attention(q, k, v, deterministic=True)
    expected = [out, *attention_backward(dout, saved)]
    found = run_rank(case, 0, None, torch.device("cpu")).parts
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("method", METHODS)
def test_repeated_runs_are_bit_identical(ranks, method):
    case = Case(4, method, batch=3, documents=PACKED, dtype=torch.float32, repeats=3)
    assert all(answer.same for answer in ranks.run(case))


@pytest.mark.sampled(8)
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("method", METHODS)
def test_any_packing_is_exact(ranks, method, seed):
    generator = torch.Generator().manual_seed(seed)
    starts = [torch.randperm(39, generator=generator)[: 4 * (seed + row) % 13] + 1 for row in range(2)]
    documents = tuple((0, *sorted(each.tolist())) for each in starts)
    assert_equals_plain_attention(ranks, Case(4, method, batch=2, length=40, documents=documents, seed=seed), 1e-10)


MANY = 10_000
ROWS = {
    "one token each": tuple(range(MANY)),
    "some over several ranks": (*range(1000), 1000, *range(2600, 6200), 6200, *range(7500, MANY)),
}


@pytest.mark.parametrize(
    ("method", "rows"),
    [
        each if each == ("ring", "one token each") else pytest.param(*each, marks=pytest.mark.slow)
        for each in product(METHODS, ROWS)
    ],
)
def test_ten_thousand_documents_a_row_are_exact(ranks, method, rows):
    """Documents of one token return their value; longer ones equal dense attention per document."""
    case = Case(4, method, kv_heads=4, length=MANY, documents=(ROWS[rows],))
    q, k, v, dout = case.inputs()
    expected = [v.clone(), torch.zeros_like(q), torch.zeros_like(k), dout.clone()]
    for first, end in pairwise((*ROWS[rows], MANY)):
        if end - first > 1:
            leaves = tuple(x[:, :, first:end].clone().requires_grad_() for x in (q, k, v))
            out = dense_attention(leaves[0], leaves[1], leaves[2])
            gradients = torch.autograd.grad(out, leaves, dout[:, :, first:end])
            for joined, its in zip(expected, (out.detach(), *gradients), strict=True):
                joined[:, :, first:end] = its
    found = case.join([answer.parts for answer in ranks.run(case)])
    assert all(torch.allclose(a, b, rtol=1e-10, atol=1e-12) for a, b in zip(found, expected, strict=True))


def test_a_ring_communicates_while_it_computes(ranks):
    step = ["keys", "block", "wait"]
    forward = [*3 * step, "block"]
    backward = [*step, "gradients"]
    backward += 2 * ["keys", "block", "wait", "wait", "gradients"]
    backward += ["block", "wait", "gradients", "wait"]
    for answer in ranks.run(Case(4, "ring")):
        assert answer.log == [*forward, "backward", *backward]


@pytest.mark.parametrize("method", ["ring", "all_gather"])
def test_a_rank_saves_its_share_of_activations(ranks, method):
    case = Case(4, method, batch=3, heads=8, kv_heads=2, length=64, head_dim=12, value_dim=8)
    total = 3 * 64 * (8 * (12 + 8 + 1) + 2 * (12 + 8))
    assert [answer.saved for answer in ranks.run(case)] == 4 * [total // 4]
