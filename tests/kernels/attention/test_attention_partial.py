"""Parts of an attention: what each gives alone, and that they add up to the whole, forward and backward."""

from __future__ import annotations

import math
from itertools import accumulate, product

import pytest
import torch
from closeness import relative_error
from torch import Tensor

from pentad.kernels.attention.attention import attention, attention_backward, attention_reference
from pentad.kernels.attention.attention_partial import merge_partials_, partial_attention, partial_attention_backward
from pentad.kernels.attention.attention_reference import (
    AttentionOptions,
    PackedLengths,
    partial_attention_backward_reference,
    partial_attention_reference,
)

Shape = tuple[int, int, int, int, int, int]  # batch, query heads, key heads, positions, width, width of values
SHAPES: list[Shape] = [(1, 4, 4, 12, 8, 8), (3, 6, 2, 8, 16, 16), (2, 4, 1, 20, 12, 8)]
WIDE: list[Shape] = [
    (1, 4, 4, 256, 128, 128),
    (3, 8, 2, 384, 64, 64),
    (2, 4, 4, 256, 192, 128),
    (1, 4, 2, 130, 72, 72),
    (1, 2, 2, 96, 20, 12),
]
GPU = [(torch.float32, 1e-5), (torch.bfloat16, 1e-2), (torch.float16, 1e-2)]


def inputs(shape: Shape, device: str, dtype: torch.dtype) -> list[Tensor]:
    """q, k, v and dout, as views of [B, S, heads, D]."""
    batch, heads, groups, length, width, value = shape
    sizes = ((heads, width), (groups, width), (groups, value), (heads, value))
    return [torch.randn(batch, length, n, d, device=device, dtype=dtype).transpose(1, 2) for n, d in sizes]


def in_halves(given: list[Tensor], deterministic: bool, scale: float) -> list[Tensor]:
    """out, dq, dk, dv of three parts: each half by itself, and the second half's queries with the first half's keys."""
    q, k, v, dout = given
    cut = q.shape[2] // 2
    first, second = slice(0, cut), slice(cut, None)
    causal, full = AttentionOptions(True, scale, deterministic), AttentionOptions(False, scale, deterministic)
    a, a_lse = partial_attention(q[:, :, first], k[:, :, first], v[:, :, first], causal)
    b, b_lse = partial_attention(q[:, :, second], k[:, :, second], v[:, :, second], causal)
    out, lse = torch.cat([a, b], 2).to(a_lse.dtype), torch.cat([a_lse, b_lse], 2)
    merge_partials_(out[:, :, second], lse[:, :, second], *partial_attention(q[:, :, second], k[:, :, first], v[:, :, first], full))
    parts = [(first, first, causal), (second, second, causal), (second, first, full)]
    sums = [torch.zeros(x.shape, dtype=lse.dtype, device=x.device) for x in (q, k, v)]
    out = out.to(q.dtype)
    for rows, columns, rule in parts:
        of_dout, of_q, of_out, of_lse = (x[:, :, rows] for x in (dout, q, out, lse))
        found = partial_attention_backward(of_dout, of_q, k[:, :, columns], v[:, :, columns], of_out, of_lse, rule)
        for total, more, at in zip(sums, found, (rows, columns, columns), strict=True):
            total[:, :, at] += more
    return [out, *sums]


def whole(given: list[Tensor], scale: float, documents: Tensor | None = None) -> list[Tensor]:
    """The definition in float64."""
    q, k, v = leaves = [x.double().detach().requires_grad_() for x in given[:3]]
    out = attention_reference(q, k, v, scale, documents)
    return [out.detach(), *torch.autograd.grad(out, leaves, given[3].double())]


def close(found: list[Tensor], expected: list[Tensor], bound: float) -> None:
    for one, other in zip(found, expected, strict=True):
        assert relative_error(one, other) < bound


def pieces(shape: Shape, device: str) -> tuple[PackedLengths, Tensor]:
    """Documents of all rows, in uneven pieces, and the number of each position's."""
    batch, length = shape[0], shape[3]
    runs = [[length - 2, 1, 1], [1, length // 2, length - length // 2 - 1], [length]]
    of_row = [runs[row % 3] for row in range(batch)]
    flat = [run for row in of_row for run in row]
    ends = torch.tensor([0, *accumulate(flat)], dtype=torch.int32, device=device)
    numbers = [torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row)) for row in of_row]
    return PackedLengths(ends, ends, (max(flat), max(flat))), torch.stack(numbers).to(device)


def packed(given: list[Tensor], shape: Shape, deterministic: bool) -> tuple[list[Tensor], list[Tensor]]:
    """What is found and what is expected of rows with documents."""
    q, k, v, dout = given
    lengths, numbers = pieces(shape, str(q.device))
    rule = AttentionOptions(True, 0.2, deterministic, lengths)
    out, lse = partial_attention(q, k, v, rule)
    return [out, *partial_attention_backward(dout, q, k, v, out, lse, rule)], whole(given, 0.2, numbers)


def with_past(given: list[Tensor], deterministic: bool) -> tuple[list[Tensor], list[Tensor]]:
    """The last third of the queries in two documents; the first of these began before all of these queries."""
    q, k, v, dout = given
    length = q.shape[2]
    late, cut = length // 3, 2 * (length // 3) // 3
    q, dout = q[:1, :, -late:], dout[:1, :, -late:]
    k, v = k[:1], v[:1]
    both = [0, cut, late], [0, length - late + cut, length]
    ends = [torch.tensor(x, dtype=torch.int32, device=q.device) for x in both]
    rule = AttentionOptions(True, 0.2, deterministic, PackedLengths(ends[0], ends[1], (max(cut, late - cut), length - late + cut)))
    out, lse = partial_attention(q, k, v, rule)
    numbers = (torch.arange(length, device=q.device) >= length - late + cut).int()[None]
    return [out, *partial_attention_backward(dout, q, k, v, out, lse, rule)], whole([q, k, v, dout], 0.2, numbers)


@pytest.mark.parametrize(("shape", "dtype"), list(product(SHAPES, (torch.float64, torch.float32))))
def test_parts_add_up_to_the_whole(shape, dtype):
    given = inputs(shape, "cpu", dtype)
    close(in_halves(given, True, 0.3), whole(given, 0.3), 1e-12 if dtype == torch.float64 else 1e-5)


@pytest.mark.parametrize("shape", SHAPES)
def test_documents_see_nothing_of_each_other(shape):
    given = inputs(shape, "cpu", torch.float64)
    close(*packed(given, shape, True), 1e-12)
    close(*with_past(given, True), 1e-12)


@pytest.mark.parametrize("shape", SHAPES)
def test_queries_of_the_last_positions_see_all_before(shape):
    q, k, v, dout = inputs(shape, "cpu", torch.float64)
    given = [q[:, :, -3:], k, v, dout[:, :, -3:]]
    rule = AttentionOptions(True, 0.3, True)
    out, lse = partial_attention(given[0], k, v, rule)
    close([out, *partial_attention_backward(given[3], given[0], k, v, out, lse, rule)], whole(given, 0.3), 1e-12)


def test_the_sum_of_parts_does_not_overflow():
    """Scores of hundreds: exp of any of them alone is out of range."""
    given = [x * 16 for x in inputs(SHAPES[0], "cpu", torch.float64)]
    q, k, _, _ = given
    assert (q @ k.transpose(2, 3)).max() > 1000
    found = in_halves(given, True, 1.0)
    assert all(x.isfinite().all() for x in found)
    close(found[:1], whole(given, 1.0)[:1], 1e-9)


def test_sixteen_bit_inputs_are_added_up_in_float32():
    q, k, v, _ = given = inputs(SHAPES[1], "cpu", torch.bfloat16)
    _, lse = partial_attention(q, k, v, AttentionOptions(True, 0.3, True))
    assert lse.dtype == torch.float32
    close(in_halves(given, True, 0.3), whole(given, 0.3), 1e-2)


@pytest.mark.parametrize("scale", [None, 0.37])
def test_values_may_be_narrower_than_keys(scale):
    q, k, v, dout = given = inputs(SHAPES[2], "cpu", torch.float64)
    out, saved = attention(q, k, v, deterministic=True, scale=scale)
    close([out, *attention_backward(dout, saved)], whole(given, scale or 12**-0.5), 1e-11)


@pytest.mark.gpu
@pytest.mark.parametrize(("shape", "deterministic", "kind"), list(product(WIDE, (False, True), GPU)))
def test_fused_parts_add_up_to_the_whole(shape, deterministic, kind):
    given = inputs(shape, "cuda", kind[0])
    close(in_halves(given, deterministic, 0.1), whole(given, 0.1), kind[1])


@pytest.mark.gpu
@pytest.mark.parametrize(("shape", "deterministic", "kind"), list(product(WIDE, (False, True), GPU)))
def test_fused_documents_see_nothing_of_each_other(shape, deterministic, kind):
    given = inputs(shape, "cuda", kind[0])
    close(*packed(given, shape, deterministic), kind[1])
    close(*with_past(given, deterministic), kind[1])


@pytest.mark.gpu
@pytest.mark.parametrize(("shape", "deterministic", "causal"), list(product(WIDE, (False, True), (False, True))))
def test_fused_parts_agree_with_the_formula(shape, deterministic, causal):
    """Rectangles: all keys, and those up to the queries' own positions."""
    q, k, v, dout = inputs(shape, "cuda", torch.bfloat16)
    q, dout = q[:, :, -32:], dout[:, :, -32:]
    rule = AttentionOptions(causal, 0.1, deterministic)
    out, lse = partial_attention(q, k, v, rule)
    wide_q, wide_k, wide_v = (x.double() for x in (q, k, v))
    expected, expected_lse = partial_attention_reference(wide_q, wide_k, wide_v, rule)
    close([out, lse], [expected, expected_lse], 1e-2)
    # of half the softmax of a whole: one more part with as large a denominator
    found = partial_attention_backward(dout, q, k, v, out / 2, lse + math.log(2), rule)
    double = expected_lse + math.log(2)
    other = partial_attention_backward_reference(dout.double(), wide_q, wide_k, wide_v, expected / 2, double, rule)
    close(list(found), list(other), 2e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", WIDE)
def test_deterministic_parts_are_bit_equal_from_run_to_run(shape):
    given = inputs(shape, "cuda", torch.bfloat16)
    runs = [[*in_halves(given, True, 0.1), *packed(given, shape, True)[0]] for _ in range(4)]
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(runs[0], run, strict=True))
    assert torch.get_deterministic_debug_mode() == 0


@pytest.mark.gpu
@pytest.mark.parametrize("deterministic", [False, True])
def test_fused_attention_takes_values_narrower_than_keys(deterministic):
    q, k, v, dout = given = inputs(WIDE[2], "cuda", torch.bfloat16)
    out, saved = attention(q, k, v, deterministic=deterministic, scale=0.1)
    close([out, *attention_backward(dout, saved)], whole(given, 0.1), 1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1, 4, 4, 512, 192, 128), (2, 8, 2, 512, 128, 128)])
def test_gradients_do_not_hang_on_the_layout_of_the_part_before(shape):
    """Out and dout of one layout after another, and with gaps between the rows of a slice."""
    q, k, v, dout = inputs(shape, "cuda", torch.bfloat16)
    rule = AttentionOptions(False, 0.1, False)
    out, lse = partial_attention(q, k, v, rule)
    wide = [x.double() for x in (dout, q, k, v, out, lse)]
    expected = partial_attention_backward_reference(wide[0], wide[1], wide[2], wide[3], wide[4], wide[5], rule)
    gapped = [torch.cat([x, x], 2)[:, :, : x.shape[2]] for x in (dout, out)]
    for one, other in (dout, out), (dout.contiguous(), out.contiguous()), gapped, (dout, out):
        close(list(partial_attention_backward(one, q, k, v, other, lse, rule)), list(expected), 1e-2)
