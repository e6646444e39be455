"""Partial attention: each part by itself, and that merged parts are the full attention, forward and backward."""

from __future__ import annotations

import math
from itertools import accumulate, product

import pytest
import torch
from dense_attention import dense_attention
from torch import Tensor

from pentad.kernels.attention.attention import attention, attention_backward
from pentad.kernels.attention.attention_merge import merge_partials_
from pentad.kernels.attention.attention_partial import partial_attention, partial_attention_backward
from pentad.kernels.attention.attention_reference import (
    AttentionOptions,
    partial_attention_backward_reference,
    partial_attention_reference,
)
from pentad.kernels.attention.packed_runs import PackedLengths

Shape = tuple[int, int, int, int, int, int]  # batch, query heads, key-value heads, positions, head dim, value dim
SHAPES: list[Shape] = [(1, 4, 4, 12, 8, 8), (3, 6, 2, 8, 16, 16), (2, 4, 1, 20, 12, 8)]
GPU_SHAPES: list[Shape] = [
    (1, 4, 4, 256, 128, 128),
    (3, 8, 2, 384, 64, 64),
    (2, 4, 4, 256, 192, 128),
    (1, 4, 2, 130, 72, 72),
    (1, 2, 2, 96, 20, 12),
]
GPU_DTYPES = [(torch.float32, 1e-5), (torch.bfloat16, 1e-2), (torch.float16, 1e-2)]


def inputs(shape: Shape, device: str, dtype: torch.dtype) -> list[Tensor]:
    """q, k, v and dout, as views of [B, S, heads, D]."""
    batch, heads, groups, length, width, value = shape
    sizes = ((heads, width), (groups, width), (groups, value), (heads, value))
    return [torch.randn(batch, length, n, d, device=device, dtype=dtype).transpose(1, 2) for n, d in sizes]


def merged_parts(tensors: list[Tensor], deterministic: bool, scale: float) -> list[Tensor]:
    """out, dq, dk, dv from three parts: each half by itself, and the second half's queries with the first's keys."""
    q, k, v, dout = tensors
    middle = q.shape[2] // 2
    first, second = slice(0, middle), slice(middle, None)
    causal, full = AttentionOptions(True, scale, deterministic), AttentionOptions(False, scale, deterministic)
    a, a_lse = partial_attention(q[:, :, first], k[:, :, first], v[:, :, first], causal)
    b, b_lse = partial_attention(q[:, :, second], k[:, :, second], v[:, :, second], causal)
    out, lse = torch.cat([a, b], 2).to(a_lse.dtype), torch.cat([a_lse, b_lse], 2)
    rectangle = partial_attention(q[:, :, second], k[:, :, first], v[:, :, first], full)
    merge_partials_(out[:, :, second], lse[:, :, second], *rectangle)
    sums = [torch.zeros(x.shape, dtype=lse.dtype, device=x.device) for x in (q, k, v)]
    out = out.to(q.dtype)
    for queries, keys, options in ((first, first, causal), (second, second, causal), (second, first, full)):
        q_part, out_part, dout_part, lse_part = (x[:, :, queries] for x in (q, out, dout, lse))
        k_part, v_part = k[:, :, keys], v[:, :, keys]
        grads = partial_attention_backward(dout_part, q_part, k_part, v_part, out_part, lse_part, options)
        for total, gradient, positions in zip(sums, grads, (queries, keys, keys), strict=True):
            total[:, :, positions] += gradient
    return [out, *sums]


def expected_of(tensors: list[Tensor], scale: float, documents: Tensor | None = None, window: int = 0) -> list[Tensor]:
    """out, dq, dk, dv of the reference in float64."""
    q, k, v = leaves = [x.double().detach().requires_grad_() for x in tensors[:3]]
    out = dense_attention(q, k, v, scale, documents, window)
    return [out.detach(), *torch.autograd.grad(out, leaves, tensors[3].double())]


def assert_close(found: list[Tensor], expected: list[Tensor], bound: float) -> None:
    """Relative to the expected tensor, or to the largest if that is zero, as are dq and dk of windows of one key."""
    largest = max(float(other.norm()) for other in expected)
    for one, other in zip(found, expected, strict=True):
        scale = float(other.norm()) or largest
        assert float((one.double() - other.double()).norm()) < bound * scale


def documents_of(shape: Shape, device: str) -> tuple[PackedLengths, Tensor]:
    """Documents of different lengths in all rows, and the number of the document at each position."""
    batch, length = shape[0], shape[3]
    kinds = [[length - 2, 1, 1], [1, length // 2, length - length // 2 - 1], [length]]
    rows = [kinds[row % 3] for row in range(batch)]
    lengths = [each for row in rows for each in row]
    ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
    numbers = [torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row)) for row in rows]
    return PackedLengths(ends, ends, (max(lengths), max(lengths))), torch.stack(numbers).to(device)


def packed(
    tensors: list[Tensor], shape: Shape, deterministic: bool, window: int = 0
) -> tuple[list[Tensor], list[Tensor]]:
    """(found, expected) for rows of several documents."""
    q, k, v, dout = tensors
    lengths, numbers = documents_of(shape, str(q.device))
    options = AttentionOptions(True, 0.2, deterministic, lengths).within(window)
    out, lse = partial_attention(q, k, v, options)
    found = [out, *partial_attention_backward(dout, q, k, v, out, lse, options)]
    return found, expected_of(tensors, 0.2, numbers, window)


def packed_slice(tensors: list[Tensor], deterministic: bool) -> tuple[list[Tensor], list[Tensor]]:
    """(found, expected) for the last third of the queries, in two documents, the first of which began earlier."""
    q, k, v, dout = tensors
    length = q.shape[2]
    size, border = length // 3, 2 * (length // 3) // 3
    q, dout = q[:1, :, -size:], dout[:1, :, -size:]
    k, v = k[:1], v[:1]
    first_document = length - size + border
    ends = [[0, border, size], [0, first_document, length]]
    cu_seqlens = [torch.tensor(x, dtype=torch.int32, device=q.device) for x in ends]
    lengths = PackedLengths(cu_seqlens[0], cu_seqlens[1], (max(border, size - border), first_document))
    options = AttentionOptions(True, 0.2, deterministic, lengths)
    out, lse = partial_attention(q, k, v, options)
    numbers = (torch.arange(length, device=q.device) >= first_document).int()[None]
    found = [out, *partial_attention_backward(dout, q, k, v, out, lse, options)]
    return found, expected_of([q, k, v, dout], 0.2, numbers)


@pytest.mark.parametrize(("shape", "dtype"), list(product(SHAPES, (torch.float64, torch.float32))))
def test_merged_parts_are_the_full_attention(shape, dtype):
    tensors = inputs(shape, "cpu", dtype)
    bound = 1e-12 if dtype == torch.float64 else 1e-5
    assert_close(merged_parts(tensors, True, 0.3), expected_of(tensors, 0.3), bound)


@pytest.mark.parametrize("shape", SHAPES)
def test_documents_do_not_attend_to_each_other(shape):
    tensors = inputs(shape, "cpu", torch.float64)
    assert_close(*packed(tensors, shape, True), 1e-12)
    assert_close(*packed(tensors, shape, True, window=3), 1e-12)
    assert_close(*packed_slice(tensors, True), 1e-12)


@pytest.mark.parametrize("shape", SHAPES)
def test_queries_at_the_last_positions_see_all_earlier_keys(shape):
    q, k, v, dout = inputs(shape, "cpu", torch.float64)
    q, dout = q[:, :, -3:], dout[:, :, -3:]
    options = AttentionOptions(True, 0.3, True)
    out, lse = partial_attention(q, k, v, options)
    found = [out, *partial_attention_backward(dout, q, k, v, out, lse, options)]
    assert_close(found, expected_of([q, k, v, dout], 0.3), 1e-12)


def test_merging_does_not_overflow():
    """With scores whose exponentials are out of range."""
    tensors = [x * 16 for x in inputs(SHAPES[0], "cpu", torch.float64)]
    q, k, _, _ = tensors
    assert (q @ k.transpose(2, 3)).max() > 1000
    found = merged_parts(tensors, True, 1.0)
    assert all(x.isfinite().all() for x in found)
    assert_close(found[:1], expected_of(tensors, 1.0)[:1], 1e-9)


def test_16_bit_inputs_are_summed_in_float32():
    q, k, v, _ = tensors = inputs(SHAPES[1], "cpu", torch.bfloat16)
    _, lse = partial_attention(q, k, v, AttentionOptions(True, 0.3, True))
    assert lse.dtype == torch.float32
    assert_close(merged_parts(tensors, True, 0.3), expected_of(tensors, 0.3), 1e-2)


@pytest.mark.parametrize("scale", [None, 0.37])
def test_values_may_be_narrower_than_keys(scale):
    q, k, v, dout = tensors = inputs(SHAPES[2], "cpu", torch.float64)
    out, saved = attention(q, k, v, deterministic=True, scale=scale)
    assert_close([out, *attention_backward(dout, saved)], expected_of(tensors, scale or 12**-0.5), 1e-11)


@pytest.mark.sampled(7)
@pytest.mark.gpu
@pytest.mark.parametrize(("shape", "deterministic", "dtype"), list(product(GPU_SHAPES, (False, True), GPU_DTYPES)))
def test_fused_merged_parts_are_the_full_attention(shape, deterministic, dtype):
    tensors = inputs(shape, "cuda", dtype[0])
    assert_close(merged_parts(tensors, deterministic, 0.1), expected_of(tensors, 0.1), dtype[1])


@pytest.mark.sampled(7)
@pytest.mark.gpu
@pytest.mark.parametrize(("shape", "deterministic", "dtype"), list(product(GPU_SHAPES, (False, True), GPU_DTYPES)))
def test_fused_documents_do_not_attend_to_each_other(shape, deterministic, dtype):
    tensors = inputs(shape, "cuda", dtype[0])
    assert_close(*packed(tensors, shape, deterministic), dtype[1])
    assert_close(*packed_slice(tensors, deterministic), dtype[1])


@pytest.mark.sampled(11)
@pytest.mark.gpu
@pytest.mark.parametrize("window", [1, 7, 300])
@pytest.mark.parametrize(("shape", "deterministic", "dtype"), list(product(GPU_SHAPES, (False, True), GPU_DTYPES)))
def test_fused_windows_are_those_of_plain_attention(shape, deterministic, dtype, window):
    q, k, v, dout = tensors = inputs(shape, "cuda", dtype[0])
    options = AttentionOptions(True, 0.2, deterministic).within(window)
    out, lse = partial_attention(q, k, v, options)
    found = [out, *partial_attention_backward(dout, q, k, v, out, lse, options)]
    assert_close(found, expected_of(tensors, 0.2, window=window), dtype[1])
    assert_close(*packed(tensors, shape, deterministic, window), dtype[1])


@pytest.mark.sampled(7)
@pytest.mark.gpu
@pytest.mark.parametrize("window_left", [0, 5, 40])
@pytest.mark.parametrize(("shape", "deterministic"), list(product(GPU_SHAPES, (False, True))))
def test_fused_bands_of_rectangles_agree_with_the_reference(shape, deterministic, window_left):
    """Few queries and many keys: every query sees some, since the diagonal ends at the last query and the last key."""
    q, k, v, dout = inputs(shape, "cuda", torch.bfloat16)
    q, dout = q[:, :, -32:], dout[:, :, -32:]
    options = AttentionOptions(False, 0.1, deterministic, window_left=window_left)
    out, lse = partial_attention(q, k, v, options)
    q64, k64, v64 = (x.double() for x in (q, k, v))
    expected, expected_lse = partial_attention_reference(q64, k64, v64, options)
    assert_close([out, lse], [expected, expected_lse], 1e-2)
    found = partial_attention_backward(dout, q, k, v, out, lse, options)
    exact = partial_attention_backward_reference(dout.double(), q64, k64, v64, expected, expected_lse, options)
    assert_close(list(found), list(exact), 2e-2)


@pytest.mark.sampled(7)
@pytest.mark.gpu
@pytest.mark.parametrize(("shape", "deterministic", "causal"), list(product(GPU_SHAPES, (False, True), (False, True))))
def test_fused_parts_agree_with_the_reference(shape, deterministic, causal):
    """The last queries with all keys, and with those up to their own positions."""
    q, k, v, dout = inputs(shape, "cuda", torch.bfloat16)
    q, dout = q[:, :, -32:], dout[:, :, -32:]
    options = AttentionOptions(causal, 0.1, deterministic)
    out, lse = partial_attention(q, k, v, options)
    q64, k64, v64 = (x.double() for x in (q, k, v))
    expected, expected_lse = partial_attention_reference(q64, k64, v64, options)
    assert_close([out, lse], [expected, expected_lse], 1e-2)
    # As if another part had as large a denominator: this one is half of the full softmax.
    found = partial_attention_backward(dout, q, k, v, out / 2, lse + math.log(2), options)
    full_lse = expected_lse + math.log(2)
    expected_grads = partial_attention_backward_reference(dout.double(), q64, k64, v64, expected / 2, full_lse, options)
    assert_close(list(found), list(expected_grads), 2e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", GPU_SHAPES)
def test_deterministic_parts_are_bit_equal_from_run_to_run(shape):
    tensors = inputs(shape, "cuda", torch.bfloat16)
    runs = [[*merged_parts(tensors, True, 0.1), *packed(tensors, shape, True)[0]] for _ in range(4)]
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(runs[0], run, strict=True))
    assert torch.get_deterministic_debug_mode() == 0


@pytest.mark.gpu
@pytest.mark.parametrize("deterministic", [False, True])
def test_fused_values_may_be_narrower_than_keys(deterministic):
    q, k, v, dout = tensors = inputs(GPU_SHAPES[2], "cuda", torch.bfloat16)
    out, saved = attention(q, k, v, deterministic=deterministic, scale=0.1)
    assert_close([out, *attention_backward(dout, saved)], expected_of(tensors, 0.1), 1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1, 4, 4, 512, 192, 128), (2, 8, 2, 512, 128, 128)])
def test_gradients_do_not_depend_on_the_layout_of_an_earlier_call(shape):
    """With out and dout in one layout after another, and with gaps between the rows of a slice."""
    q, k, v, dout = inputs(shape, "cuda", torch.bfloat16)
    options = AttentionOptions(False, 0.1, False)
    out, lse = partial_attention(q, k, v, options)
    exact = [x.double() for x in (dout, q, k, v, out, lse)]
    expected = partial_attention_backward_reference(exact[0], exact[1], exact[2], exact[3], exact[4], exact[5], options)
    gapped = [torch.cat([x, x], 2)[:, :, : x.shape[2]] for x in (dout, out)]
    for one, other in (dout, out), (dout.contiguous(), out.contiguous()), gapped, (dout, out):
        assert_close(list(partial_attention_backward(one, q, k, v, other, lse, options)), list(expected), 1e-2)


@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (20, 0.0), (0, 0.7)])
@pytest.mark.parametrize("starts", [(0, 200), (0, 1, 2, 3, 50, 200, 201, 390, 400, 401, 599), range(600)])
def test_segments_that_are_computed_by_themselves_equal_dense_attention(starts, window, softcap):
    """Three rows of 200 tokens, more than the 128 of a group of segments."""
    ends = torch.tensor(sorted({*starts, 200, 400, 600}), dtype=torch.int32)
    longest = int(ends.diff().max())
    q, k, v, dout = inputs((3, 4, 2, 200, 8, 6), "cpu", torch.float64)
    options = AttentionOptions(True, 0.3, True, PackedLengths(ends, ends, (longest, longest)), softcap=softcap)
    options = options.within(window)
    out, lse = partial_attention(q, k, v, options)
    found = partial_attention_backward(dout, q, k, v, out, lse, options)
    documents = torch.searchsorted(ends, torch.arange(600), right=True).view(3, 200)
    leaves = tuple(x.requires_grad_() for x in (q, k, v))
    expected = dense_attention(q, k, v, 0.3, documents, window, softcap)
    gradients = torch.autograd.grad(expected, leaves, dout)
    torch.testing.assert_close(out, expected.detach(), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(list(found), list(gradients), rtol=1e-10, atol=1e-12)


SEGMENTS = [(5, 0), (0, 9), (200, 40), (1, 120), (0, 150), (34, 0)]  # queries and keys: 240 and 319


def part_in_segments(device: str, dtype: torch.dtype, width: int, deterministic: bool) -> list[list[Tensor]]:
    """[found, expected]: out, lse, dq, dk and dv of a part in which some segments have no keys, and some no queries. A
    query that sees no key has a gradient of 0 here, as all of it comes from other parts."""
    generator = torch.Generator().manual_seed(0)
    sizes = ((240, 4), (319, 2), (319, 2), (240, 4))
    q, k, v, dout = (
        torch.randn(1, n, heads, width, generator=generator).to(device, dtype).transpose(1, 2) for n, heads in sizes
    )
    ends = [
        torch.tensor([0, *accumulate(each)], dtype=torch.int32, device=device) for each in zip(*SEGMENTS, strict=True)
    ]
    lengths = PackedLengths(ends[0], ends[1], (200, 150))
    options = AttentionOptions(False, 0.2, deterministic, lengths)
    out, lse = partial_attention(q, k, v, options)
    found = [
        out,
        lse,
        *partial_attention_backward(dout, q, k, v, out, torch.logaddexp(lse, torch.zeros_like(lse)), options),
    ]
    expected = [torch.zeros_like(x, dtype=torch.float64) for x in found]
    expected[1] -= torch.inf
    queries, keys = 0, 0
    for number, count in SEGMENTS:
        at, of = slice(queries, queries + number), slice(keys, keys + count)
        queries, keys = queries + number, keys + count
        if number and count:
            leaves = [q[:, :, at].double(), k[:, :, of].double(), v[:, :, of].double()]
            q64, k64, v64 = (x.detach().requires_grad_() for x in leaves)
            scores = q64 @ k64.repeat_interleave(2, 1).transpose(2, 3) * 0.2
            expected[1][:, :, at] = scores.logsumexp(3).detach()
            part = scores.softmax(3) @ v64.repeat_interleave(2, 1)
            expected[0][:, :, at] = part.detach()
            # The rest of the softmax has an lse of 0, and values that make the full output equal to this part's.
            full_lse = torch.logaddexp(scores.logsumexp(3), torch.zeros((), dtype=torch.float64, device=device))
            p = (scores - full_lse.unsqueeze(3)).exp()
            full = p @ v64.repeat_interleave(2, 1) + (1 - p.sum(3, keepdim=True)) * part.detach()
            gradients = torch.autograd.grad(full, (q64, k64, v64), dout[:, :, at].double())
            for total, its, place in zip(expected[2:], gradients, (at, of, of), strict=True):
                total[:, :, place] = its
    return [found, expected]


def test_segments_without_keys_see_nothing():
    found, expected = part_in_segments("cpu", torch.float64, 8, True)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.gpu
@pytest.mark.parametrize("width", [128, 72])
@pytest.mark.parametrize("deterministic", [True, False])
def test_fused_segments_without_keys_see_nothing(width, deterministic):
    """With our backward (128) and with flash attention's (72)."""
    found, expected = part_in_segments("cuda", torch.bfloat16, width, deterministic)
    assert torch.equal(found[1].isneginf(), expected[1].isneginf())
    assert all(torch.isfinite(x).all() for x in (found[0], *found[2:]))
    assert_close([found[0], *found[2:]], [expected[0], *expected[2:]], 2e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("width", [128, 72])
@pytest.mark.parametrize("deterministic", [True, False])
def test_ten_thousand_segments_of_one_token_return_their_values(width, deterministic):
    """Also on the device, with our backward (128) and with flash attention's (72)."""
    q, k, v, dout = (x.contiguous() for x in inputs((1, 4, 4, 10_000, width, width), "cuda", torch.bfloat16))
    ends = torch.arange(10_001, dtype=torch.int32, device="cuda")
    options = AttentionOptions(True, 0.1, deterministic, PackedLengths(ends, ends, (1, 1)))
    out, lse = partial_attention(q, k, v, options)
    dq, dk, dv = partial_attention_backward(dout, q, k, v, out, lse, options)
    torch.testing.assert_close(out, v)
    torch.testing.assert_close(dv, dout)
    assert max(float(x.abs().max()) for x in (dq, dk)) < 0.05
