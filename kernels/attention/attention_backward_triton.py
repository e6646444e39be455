"""The backward of attention in Triton, which adds in a fixed order (FlashAttention-2's equations, arXiv 2307.08691).

Two kernels: one sums dk and dv of a block of keys over its queries, the other dq of a block of queries over its keys.
Both recompute the probabilities from the log-sum-exp: seven products instead of five, and no sum whose order changes
from run to run.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from pentad.kernels.attention.attention_blocks_triton import (
    LOG2_E,
    NUMBERS,
    Blocks,
    block_of,
    capped,
    flags_of,
    keys_of,
    queries_of,
    rows_of,
    scores_of,
    segment_of,
    segments_of,
    stride_of,
    tokens_of,
    visible,
)
from pentad.kernels.attention.attention_reference import AttentionOptions, joined_gradients
from pentad.kernels.backend import ceil_div, shared_memory

ROWS = 64  # of a program of `_row_terms`


@triton.jit(do_not_specialize=NUMBERS)
def _row_terms(
    dout, out, lse, log2_lse, delta, stride_dout, stride_out, HEADS, LENGTH, ROWS: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """For each query: lse to base 2, and the sum of dout * out."""
    row, head = tl.cast(tl.program_id(2), tl.int64), tl.program_id(1)
    first = tl.program_id(0) * ROWS
    token = first + tl.arange(0, ROWS)
    dout_at, out_at = tokens_of(dout, stride_dout, row, head, 0), tokens_of(out, stride_out, row, head, 0)
    a = block_of(dout_at, first, stride_dout[2], LENGTH, False, ROWS, WIDTH).to(tl.float32)
    b = block_of(out_at, first, stride_out[2], LENGTH, False, ROWS, WIDTH).to(tl.float32)
    at, is_token = (row * HEADS + head) * LENGTH + token, token < LENGTH
    tl.store(delta + at, tl.sum(a * b, axis=1), mask=is_token)
    tl.store(log2_lse + at, tl.load(lse + at, mask=is_token, other=0) * LOG2_E, mask=is_token)


@triton.jit
def _add_queries(
    sum_k, sum_rest, sum_v, k_block, k_rest, v_block, q, dout, log2_lse, delta, stride_q, stride_dout,
    first, end, key, queries, keys, diagonal, window, scale, cap_scale,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr, EVEN: tl.constexpr,
    QUERIES: tl.constexpr, WIDTH: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """(dk, the rest of its columns, dv) of a block of keys, with the queries from `first` to before `end` added."""
    for start in range(first, end, QUERIES):
        query = start + tl.arange(0, QUERIES)
        is_query = (query < queries) | EVEN
        q_block = block_of(q, start, stride_q, queries, EVEN, QUERIES, WIDTH)
        d_block = block_of(dout, start, stride_dout, queries, EVEN, QUERIES, WIDTH)
        lse_row = tl.load(log2_lse + query, mask=is_query, other=0)
        delta_row = tl.load(delta + query, mask=is_query, other=0)
        scores = tl.dot(k_block, tl.trans(q_block))
        if REST:
            q_rest = block_of(q + WIDTH, start, stride_q, queries, EVEN, QUERIES, REST)
            scores = tl.dot(k_rest, tl.trans(q_rest), scores)
        if CAPPED:
            scores = capped(scores * cap_scale)
        p = tl.exp2(scores * scale - lse_row[None, :])
        if MASKED:
            seen = visible(query[None, :], key[:, None], queries, keys, diagonal, window, CAUSAL, WINDOWED, EVEN)
            p = tl.where(seen, p, 0.0)
        sum_v = tl.dot(p.to(d_block.dtype), d_block, sum_v)
        ds = p * (tl.dot(v_block, tl.trans(d_block)) - delta_row[None, :])
        if CAPPED:
            ds *= 1.0 - scores * scores
        sum_k = tl.dot(ds.to(q_block.dtype), q_block, sum_k)
        if REST:
            sum_rest = tl.dot(ds.to(q_block.dtype), q_rest, sum_rest)
    return sum_k, sum_rest, sum_v


@triton.jit(do_not_specialize=NUMBERS)
def _keys_and_values(
    q, k, v, dout, log2_lse, delta, dk, dv, cu_seqlens_q, cu_seqlens_k,
    stride_q, stride_k, stride_v, stride_dout, stride_dk, stride_dv,
    GROUP, LENGTH_Q, LENGTH_K, window, scale, cap_scale, factor,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr, PACKED: tl.constexpr, SHORT: tl.constexpr,
    EVEN: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """dk and dv of a block of keys of one head, from the query heads of its group one after another."""
    head, segment = tl.program_id(1), tl.program_id(2)
    q_start, queries = segment_of(cu_seqlens_q, segment, LENGTH_Q, PACKED)
    k_start, keys = segment_of(cu_seqlens_k, segment, LENGTH_K, PACKED)
    first_key, diagonal = tl.program_id(0) * KEYS, keys - queries
    row = tl.cast(0 if PACKED else segment, tl.int64)
    if first_key < keys:
        key, column = first_key + tl.arange(0, KEYS), tl.arange(0, WIDTH)[None, :]
        k_at, v_at = tokens_of(k, stride_k, row, head, k_start), tokens_of(v, stride_v, row, head, k_start)
        k_block = block_of(k_at, first_key, stride_k[2], keys, EVEN, KEYS, WIDTH)
        v_block = block_of(v_at, first_key, stride_v[2], keys, EVEN, KEYS, WIDTH)
        k_rest, sum_rest = k_block, v_block  # placeholders
        if REST:
            k_rest = block_of(k_at + WIDTH, first_key, stride_k[2], keys, EVEN, KEYS, REST)
            sum_rest = tl.zeros([KEYS, REST], tl.float32)
        first, inner, outer, end = queries_of(
            first_key, queries, keys, diagonal, window, CAUSAL, WINDOWED, SHORT, QUERIES, KEYS
        )
        sum_k, sum_v = tl.zeros([KEYS, WIDTH], tl.float32), tl.zeros([KEYS, WIDTH], tl.float32)
        for member in range(GROUP):
            q_head = head * GROUP + member
            q_at = tokens_of(q, stride_q, row, q_head, q_start)
            dout_at = tokens_of(dout, stride_dout, row, q_head, q_start)
            term = (row * (GROUP * tl.num_programs(1)) + q_head) * LENGTH_Q + q_start
            if CAUSAL and not SHORT:
                sum_k, sum_rest, sum_v = _add_queries(
                    sum_k, sum_rest, sum_v, k_block, k_rest, v_block, q_at, dout_at, log2_lse + term, delta + term,
                    stride_q[2], stride_dout[2], first, inner, key, queries, keys, diagonal, window, scale, cap_scale,
                    True, CAUSAL, WINDOWED, CAPPED, EVEN, QUERIES, WIDTH, REST,
                )  # fmt: skip
            if not SHORT:
                sum_k, sum_rest, sum_v = _add_queries(
                    sum_k, sum_rest, sum_v, k_block, k_rest, v_block, q_at, dout_at, log2_lse + term, delta + term,
                    stride_q[2], stride_dout[2], inner, outer, key, queries, keys, diagonal, window, scale, cap_scale,
                    False, CAUSAL, WINDOWED, CAPPED, True, QUERIES, WIDTH, REST,
                )  # fmt: skip
            if WINDOWED or not EVEN:
                sum_k, sum_rest, sum_v = _add_queries(
                    sum_k, sum_rest, sum_v, k_block, k_rest, v_block, q_at, dout_at, log2_lse + term, delta + term,
                    stride_q[2], stride_dout[2], outer, end, key, queries, keys, diagonal, window, scale, cap_scale,
                    True, CAUSAL, WINDOWED, CAPPED, EVEN, QUERIES, WIDTH, REST,
                )  # fmt: skip
        is_key, token = ((key < keys) | EVEN)[:, None], key.to(tl.int64)[:, None]
        dk_at, dv_at = tokens_of(dk, stride_dk, row, head, k_start), tokens_of(dv, stride_dv, row, head, k_start)
        tl.store(dk_at + token * stride_dk[2] + column, (sum_k * factor).to(dk.dtype.element_ty), mask=is_key)
        if REST:
            rest_at = dk_at + WIDTH + token * stride_dk[2] + tl.arange(0, REST)[None, :]
            tl.store(rest_at, (sum_rest * factor).to(dk.dtype.element_ty), mask=is_key)
        tl.store(dv_at + token * stride_dv[2] + column, sum_v.to(dv.dtype.element_ty), mask=is_key)


@triton.jit
def _add_keys(
    total, total_rest, q_block, q_rest, d_block, lse_row, delta_row, k, v, stride_k, stride_v,
    first, end, query, queries, keys, diagonal, window, scale, cap_scale,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr, EVEN: tl.constexpr,
    KEYS: tl.constexpr, WIDTH: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """(dq, the rest of its columns) of a block of queries, with the keys from `first` to before `end` added."""
    for start in range(first, end, KEYS):
        key = start + tl.arange(0, KEYS)
        k_block = block_of(k, start, stride_k, keys, EVEN, KEYS, WIDTH)
        v_block = block_of(v, start, stride_v, keys, EVEN, KEYS, WIDTH)
        scores = tl.dot(q_block, tl.trans(k_block))
        if REST:
            k_rest = block_of(k + WIDTH, start, stride_k, keys, EVEN, KEYS, REST)
            scores = tl.dot(q_rest, tl.trans(k_rest), scores)
        if CAPPED:
            scores = capped(scores * cap_scale)
        p = tl.exp2(scores * scale - lse_row[:, None])
        if MASKED:
            seen = visible(query[:, None], key[None, :], queries, keys, diagonal, window, CAUSAL, WINDOWED, EVEN)
            p = tl.where(seen, p, 0.0)
        ds = p * (tl.dot(d_block, tl.trans(v_block)) - delta_row[:, None])
        if CAPPED:
            ds *= 1.0 - scores * scores
        total = tl.dot(ds.to(k_block.dtype), k_block, total)
        if REST:
            total_rest = tl.dot(ds.to(k_block.dtype), k_rest, total_rest)
    return total, total_rest


@triton.jit(do_not_specialize=NUMBERS)
def _queries(
    q, k, v, dout, log2_lse, delta, dq, cu_seqlens_q, cu_seqlens_k,
    stride_q, stride_k, stride_v, stride_dout, stride_dq,
    GROUP, LENGTH_Q, LENGTH_K, window, scale, cap_scale, factor,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr, PACKED: tl.constexpr, SHORT: tl.constexpr,
    EVEN: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """dq of a block of queries of one head. The last block sees most keys under a causal mask, so it comes first."""
    head, segment = tl.program_id(1), tl.program_id(2)
    q_start, queries = segment_of(cu_seqlens_q, segment, LENGTH_Q, PACKED)
    k_start, keys = segment_of(cu_seqlens_k, segment, LENGTH_K, PACKED)
    first_query, diagonal = (tl.num_programs(0) - 1 - tl.program_id(0)) * QUERIES, keys - queries
    row = tl.cast(0 if PACKED else segment, tl.int64)
    if first_query < queries:
        query, column = first_query + tl.arange(0, QUERIES), tl.arange(0, WIDTH)[None, :]
        is_query = (query < queries) | EVEN
        q_at = tokens_of(q, stride_q, row, head, q_start)
        dout_at = tokens_of(dout, stride_dout, row, head, q_start)
        q_block = block_of(q_at, first_query, stride_q[2], queries, EVEN, QUERIES, WIDTH)
        d_block = block_of(dout_at, first_query, stride_dout[2], queries, EVEN, QUERIES, WIDTH)
        term = (row * tl.num_programs(1) + head) * LENGTH_Q + q_start + query
        lse_row = tl.load(log2_lse + term, mask=is_query, other=0)
        delta_row = tl.load(delta + term, mask=is_query, other=0)
        k_at = tokens_of(k, stride_k, row, head // GROUP, k_start)
        v_at = tokens_of(v, stride_v, row, head // GROUP, k_start)
        first, inner, outer, end = keys_of(
            first_query, queries, keys, diagonal, window, CAUSAL, WINDOWED, SHORT, QUERIES, KEYS
        )
        total, total_rest, q_rest = tl.zeros([QUERIES, WIDTH], tl.float32), q_block, q_block  # two placeholders
        if REST:
            q_rest = block_of(q_at + WIDTH, first_query, stride_q[2], queries, EVEN, QUERIES, REST)
            total_rest = tl.zeros([QUERIES, REST], tl.float32)
        if WINDOWED and not SHORT:
            total, total_rest = _add_keys(
                total, total_rest, q_block, q_rest, d_block, lse_row, delta_row, k_at, v_at, stride_k[2], stride_v[2],
                first, inner, query, queries, keys, diagonal, window, scale, cap_scale,
                True, CAUSAL, WINDOWED, CAPPED, EVEN, KEYS, WIDTH, REST,
            )  # fmt: skip
        if not SHORT:
            total, total_rest = _add_keys(
                total, total_rest, q_block, q_rest, d_block, lse_row, delta_row, k_at, v_at, stride_k[2], stride_v[2],
                inner, outer, query, queries, keys, diagonal, window, scale, cap_scale,
                False, CAUSAL, WINDOWED, CAPPED, True, KEYS, WIDTH, REST,
            )  # fmt: skip
        if CAUSAL or not EVEN:
            total, total_rest = _add_keys(
                total, total_rest, q_block, q_rest, d_block, lse_row, delta_row, k_at, v_at, stride_k[2], stride_v[2],
                outer, end, query, queries, keys, diagonal, window, scale, cap_scale,
                True, CAUSAL, WINDOWED, CAPPED, EVEN, KEYS, WIDTH, REST,
            )  # fmt: skip
        at = tokens_of(dq, stride_dq, row, head, q_start) + query.to(tl.int64)[:, None] * stride_dq[2]
        tl.store(at + column, (total * factor).to(dq.dtype.element_ty), mask=is_query[:, None])
        if REST:
            rest_at = at + WIDTH + tl.arange(0, REST)[None, :]
            tl.store(rest_at, (total_rest * factor).to(dq.dtype.element_ty), mask=is_query[:, None])


class _Operands(NamedTuple):
    """Tensors as the kernels index them, [rows, heads, tokens, width]; packed rows are joined into one."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    log2_lse: Tensor  # [rows, heads, tokens] float32 contiguous
    delta: Tensor

    @property
    def strides(self) -> list[tuple[int, ...]]:
        return [stride_of(x) for x in self[:4]]


def attention_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, options: AttentionOptions
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv), each a [B, heads, S, D] view of [B, S, heads, D], in one tensor if all have the same length and
    width; see `attention_partial`. The width of values is a power of two, and queries and keys are equally wide or
    wider by a power of two."""
    operands = _operands(dout, q, k, v, out, lse, options)
    gradients = dq, dk, dv = joined_gradients(q, k, v)
    to_q, to_k, to_v = (rows_of(x, options) for x in gradients)
    (_, heads, queries, _), (_, groups, keys, width) = operands.q.shape, operands.v.shape
    segments, scores = segments_of(options, operands.q, operands.k), scores_of(options)
    sizes = heads // groups, queries, keys, options.window_left or 0
    numbers = (*sizes, scores.scale, scores.cap_scale, float(options.scale))
    of_keys, of_queries = blocks_for(width, operands.q.shape[3] - width, q.device)
    _keys_and_values[(ceil_div(segments.longest[1], of_keys.KEYS), groups, segments.number)](
        *operands, to_k, to_v, *segments.cu_seqlens, *operands.strides, stride_of(to_k), stride_of(to_v), *numbers,
        **flags_of(options, of_keys, operands.q, operands.v), **of_keys._asdict(),
    )  # fmt: skip
    _queries[(ceil_div(segments.longest[0], of_queries.QUERIES), heads, segments.number)](
        *operands, to_q, *segments.cu_seqlens, *operands.strides, stride_of(to_q), *numbers,
        **flags_of(options, of_queries, operands.q, operands.v), **of_queries._asdict(),
    )  # fmt: skip
    return dq, dk, dv


def blocks_for(width: int, rest: int, device: torch.device) -> tuple[Blocks, Blocks]:
    """The block sizes of the kernel of dk and dv, and of that of dq."""
    if width < 128:
        return Blocks(64, 64, 4, 3), Blocks(64, 64, 4, 3)
    needed = 200 if rest or width > 128 else 160  # KiB: an H100 has both, an A100 only the latter
    large = device.type != "cuda" or shared_memory(device) >= needed * 1024
    if width > 128:
        return Blocks(32, 64, 8, 2), Blocks(64, 64, 8, 2) if large else Blocks(64, 32, 8, 2)
    return Blocks(32, 64, 4, 3), Blocks(128, 64, 8, 3) if large else Blocks(64, 64, 4, 2)


def _operands(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, options: AttentionOptions
) -> _Operands:
    if options.lengths is not None:
        lse = lse.transpose(0, 1).flatten(1).unsqueeze(0)
    lse, q, k, v, dout, out = lse.float().contiguous(), *(rows_of(x, options) for x in (q, k, v, dout, out))
    (rows, heads, queries, width), log2_lse, delta = dout.shape, torch.empty_like(lse), torch.empty_like(lse)
    _row_terms[(ceil_div(queries, ROWS), heads, rows)](
        dout, out, lse, log2_lse, delta, stride_of(dout), stride_of(out), heads, queries, ROWS, width
    )
    return _Operands(q, k, v, dout, log2_lse, delta)
