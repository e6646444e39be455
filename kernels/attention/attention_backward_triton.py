"""The backward of attention in Triton, which adds in a fixed order (FlashAttention-2's equations, arXiv 2307.08691).

Two kernels: one adds up dk and dv of a block of keys over its queries, the other dq of a block of queries over its
keys. Both compute the probabilities again from the log-sum-exp: seven products instead of five, and no sum whose order
changes from run to run.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from pentad.kernels.attention.attention_reference import AttentionOptions
from pentad.kernels.backend import ceil_div, shared_memory

LOG2_E = tl.constexpr(1.4426950408889634)
ROWS = 64  # of a program of `_row_terms`


class Blocks(NamedTuple):
    """Queries and keys of a program's step, and how it runs. The fastest of some ten on one H200."""

    QUERIES: int
    KEYS: int
    num_warps: int
    num_stages: int


# Lengths of 1 would become constants, which have no methods. A stride is that of (a row, a head, a token).
NUMBERS = ("LENGTH_Q", "LENGTH_K", "window", "HEADS", "LENGTH")


@triton.jit(do_not_specialize=NUMBERS)
def _row_terms(
    dout, out, lse, log2_lse, delta, stride_dout, stride_out, HEADS, LENGTH, ROWS: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """For each query: lse to base 2, and the sum of dout * out."""
    row, head = tl.cast(tl.program_id(2), tl.int64), tl.program_id(1)
    first = tl.program_id(0) * ROWS
    token = first + tl.arange(0, ROWS)
    a = _block(dout + _at(stride_dout, row, head, 0), first, stride_dout[2], LENGTH, False, ROWS, WIDTH).to(tl.float32)
    b = _block(out + _at(stride_out, row, head, 0), first, stride_out[2], LENGTH, False, ROWS, WIDTH).to(tl.float32)
    at, is_token = (row * HEADS + head) * LENGTH + token, token < LENGTH
    tl.store(delta + at, tl.sum(a * b, axis=1), mask=is_token)
    tl.store(log2_lse + at, tl.load(lse + at, mask=is_token, other=0) * LOG2_E, mask=is_token)


@triton.jit
def _segment(cu_seqlens, number, LENGTH, PACKED: tl.constexpr):
    """(first token, length) of a segment; without packing a row is one."""
    start, length = 0, LENGTH
    if PACKED:
        start = tl.load(cu_seqlens + number)
        length = tl.load(cu_seqlens + number + 1) - start
    return start, length


@triton.jit
def _visible(
    query, key, queries, keys, diagonal, window,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Which (query, key) pairs are visible. Under a causal mask, keys past the last one come after every query."""
    visible = query >= 0
    if not EVEN:
        visible = visible & (query < queries) & (key < keys)
    if CAUSAL:
        visible = visible & (key <= query + diagonal)
    if WINDOWED:
        visible = visible & (key >= query + diagonal - window)
    return visible


@triton.jit
def _at(stride, row, head, start):
    """Offset of a segment's first token."""
    return row * stride[0] + tl.cast(head, tl.int64) * stride[1] + tl.cast(start, tl.int64) * stride[2]


@triton.jit
def _block(x, start, stride, limit, EVEN: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Rows of `x` from `start` on, zeros from `limit` on. Only the offset of the first needs 64 bits."""
    row = tl.arange(0, ROWS)[:, None]
    at = x + tl.cast(start, tl.int64) * stride + row * stride + tl.arange(0, WIDTH)[None, :]
    return tl.load(at) if EVEN else tl.load(at, mask=start + row < limit, other=0)


@triton.jit
def _add_queries(
    sum_k, sum_rest, sum_v, k_block, k_rest, v_block, q, dout, log2_lse, delta, stride_q, stride_dout,
    first, end, key, queries, keys, diagonal, window, scale, MASKED: tl.constexpr, CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr, EVEN: tl.constexpr, QUERIES: tl.constexpr, WIDTH: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """(dk, the rest of its columns, dv) of a block of keys, with the queries from `first` to before `end` added."""
    for start in range(first, end, QUERIES):
        query = start + tl.arange(0, QUERIES)
        is_query = (query < queries) | EVEN
        q_block = _block(q, start, stride_q, queries, EVEN, QUERIES, WIDTH)
        d_block = _block(dout, start, stride_dout, queries, EVEN, QUERIES, WIDTH)
        lse_row = tl.load(log2_lse + query, mask=is_query, other=0)
        delta_row = tl.load(delta + query, mask=is_query, other=0)
        scores = tl.dot(k_block, tl.trans(q_block))
        if REST:
            q_rest = _block(q + WIDTH, start, stride_q, queries, EVEN, QUERIES, REST)
            scores = tl.dot(k_rest, tl.trans(q_rest), scores)
        p = tl.exp2(scores * scale - lse_row[None, :])
        if MASKED:
            seen = _visible(query[None, :], key[:, None], queries, keys, diagonal, window, CAUSAL, WINDOWED, EVEN)
            p = tl.where(seen, p, 0.0)
        sum_v = tl.dot(p.to(d_block.dtype), d_block, sum_v)
        ds = p * (tl.dot(v_block, tl.trans(d_block)) - delta_row[None, :])
        sum_k = tl.dot(ds.to(q_block.dtype), q_block, sum_k)
        if REST:
            sum_rest = tl.dot(ds.to(q_block.dtype), q_rest, sum_rest)
    return sum_k, sum_rest, sum_v


@triton.jit(do_not_specialize=NUMBERS)
def _keys_and_values(
    q, k, v, dout, log2_lse, delta, dk, dv, cu_seqlens_q, cu_seqlens_k,
    stride_q, stride_k, stride_v, stride_dout, stride_dk, stride_dv, GROUP, LENGTH_Q, LENGTH_K, window, scale, factor,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, PACKED: tl.constexpr, EVEN: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """dk and dv of a block of keys of one head, from the query heads of its group one after another."""
    head, segment = tl.program_id(1), tl.program_id(2)
    q_start, queries = _segment(cu_seqlens_q, segment, LENGTH_Q, PACKED)
    k_start, keys = _segment(cu_seqlens_k, segment, LENGTH_K, PACKED)
    first_key, diagonal = tl.program_id(0) * KEYS, keys - queries
    row = tl.cast(0 if PACKED else segment, tl.int64)
    if first_key < keys:
        key, column = first_key + tl.arange(0, KEYS), tl.arange(0, WIDTH)[None, :]
        k_block = _block(k + _at(stride_k, row, head, k_start), first_key, stride_k[2], keys, EVEN, KEYS, WIDTH)
        v_block = _block(v + _at(stride_v, row, head, k_start), first_key, stride_v[2], keys, EVEN, KEYS, WIDTH)
        k_rest, sum_rest = k_block, v_block  # of no use
        if REST:
            rest = k + WIDTH + _at(stride_k, row, head, k_start)
            k_rest = _block(rest, first_key, stride_k[2], keys, EVEN, KEYS, REST)
            sum_rest = tl.zeros([KEYS, REST], tl.float32)
        first, unmasked, end = 0, 0, queries
        if CAUSAL:
            first = tl.maximum(first_key - diagonal, 0) // QUERIES * QUERIES
            unmasked = tl.maximum(tl.cdiv(first_key + KEYS - 1 - diagonal, QUERIES) * QUERIES, first)
        if WINDOWED:
            end = tl.minimum(queries, first_key + KEYS - diagonal + window)
        if WINDOWED or not EVEN:
            unmasked = end
        sum_k, sum_v = tl.zeros([KEYS, WIDTH], tl.float32), tl.zeros([KEYS, WIDTH], tl.float32)
        for member in range(GROUP):
            q_head = head * GROUP + member
            q_at, dout_at = q + _at(stride_q, row, q_head, q_start), dout + _at(stride_dout, row, q_head, q_start)
            term = (row * (GROUP * tl.num_programs(1)) + q_head) * LENGTH_Q + q_start
            if CAUSAL or WINDOWED or not EVEN:
                sum_k, sum_rest, sum_v = _add_queries(
                    sum_k, sum_rest, sum_v, k_block, k_rest, v_block, q_at, dout_at, log2_lse + term, delta + term,
                    stride_q[2], stride_dout[2], first, tl.minimum(unmasked, end), key,
                    queries, keys, diagonal, window, scale,
                    True, CAUSAL, WINDOWED, EVEN, QUERIES, WIDTH, REST,
                )  # fmt: skip
            if EVEN and not WINDOWED:
                sum_k, sum_rest, sum_v = _add_queries(
                    sum_k, sum_rest, sum_v, k_block, k_rest, v_block, q_at, dout_at, log2_lse + term, delta + term,
                    stride_q[2], stride_dout[2], unmasked, end, key, queries, keys, diagonal, window, scale,
                    False, CAUSAL, WINDOWED, EVEN, QUERIES, WIDTH, REST,
                )  # fmt: skip
        is_key, token = ((key < keys) | EVEN)[:, None], key.to(tl.int64)[:, None]
        at_dk, at_dv = dk + _at(stride_dk, row, head, k_start), dv + _at(stride_dv, row, head, k_start)
        tl.store(at_dk + token * stride_dk[2] + column, (sum_k * factor).to(dk.dtype.element_ty), mask=is_key)
        if REST:
            at_rest = at_dk + WIDTH + token * stride_dk[2] + tl.arange(0, REST)[None, :]
            tl.store(at_rest, (sum_rest * factor).to(dk.dtype.element_ty), mask=is_key)
        tl.store(at_dv + token * stride_dv[2] + column, sum_v.to(dv.dtype.element_ty), mask=is_key)


@triton.jit
def _add_keys(
    total, total_rest, q_block, q_rest, d_block, lse_row, delta_row, k, v, stride_k, stride_v,
    first, end, query, queries, keys, diagonal, window, scale, MASKED: tl.constexpr, CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr, EVEN: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """(dq, the rest of its columns) of a block of queries, with the keys from `first` to before `end` added."""
    for start in range(first, end, KEYS):
        key = start + tl.arange(0, KEYS)
        k_block, v_block = (
            _block(k, start, stride_k, keys, EVEN, KEYS, WIDTH),
            _block(v, start, stride_v, keys, EVEN, KEYS, WIDTH),
        )
        scores = tl.dot(q_block, tl.trans(k_block))
        if REST:
            k_rest = _block(k + WIDTH, start, stride_k, keys, EVEN, KEYS, REST)
            scores = tl.dot(q_rest, tl.trans(k_rest), scores)
        p = tl.exp2(scores * scale - lse_row[:, None])
        if MASKED:
            seen = _visible(query[:, None], key[None, :], queries, keys, diagonal, window, CAUSAL, WINDOWED, EVEN)
            p = tl.where(seen, p, 0.0)
        ds = p * (tl.dot(d_block, tl.trans(v_block)) - delta_row[:, None])
        total = tl.dot(ds.to(k_block.dtype), k_block, total)
        if REST:
            total_rest = tl.dot(ds.to(k_block.dtype), k_rest, total_rest)
    return total, total_rest


@triton.jit(do_not_specialize=NUMBERS)
def _queries(
    q, k, v, dout, log2_lse, delta, dq, cu_seqlens_q, cu_seqlens_k,
    stride_q, stride_k, stride_v, stride_dout, stride_dq, GROUP, LENGTH_Q, LENGTH_K, window, scale, factor,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, PACKED: tl.constexpr, EVEN: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """dq of a block of queries of one head. The last block sees most keys under a causal mask, so it comes first."""
    head, segment = tl.program_id(1), tl.program_id(2)
    q_start, queries = _segment(cu_seqlens_q, segment, LENGTH_Q, PACKED)
    k_start, keys = _segment(cu_seqlens_k, segment, LENGTH_K, PACKED)
    first_query, diagonal = (tl.num_programs(0) - 1 - tl.program_id(0)) * QUERIES, keys - queries
    row = tl.cast(0 if PACKED else segment, tl.int64)
    if first_query < queries:
        query, column = first_query + tl.arange(0, QUERIES), tl.arange(0, WIDTH)[None, :]
        is_query = (query < queries) | EVEN
        q_block = _block(q + _at(stride_q, row, head, q_start), first_query, stride_q[2], queries, EVEN, QUERIES, WIDTH)
        d_block = _block(
            dout + _at(stride_dout, row, head, q_start), first_query, stride_dout[2], queries, EVEN, QUERIES, WIDTH
        )
        term = (row * tl.num_programs(1) + head) * LENGTH_Q + q_start + query
        lse_row, delta_row = (
            tl.load(log2_lse + term, mask=is_query, other=0),
            tl.load(delta + term, mask=is_query, other=0),
        )
        k_at, v_at = k + _at(stride_k, row, head // GROUP, k_start), v + _at(stride_v, row, head // GROUP, k_start)
        first, masked, end = 0, keys, keys
        if CAUSAL:
            end = tl.minimum(keys, first_query + QUERIES + diagonal)
            masked = tl.maximum((first_query + diagonal + 1) // KEYS * KEYS, 0)
        if WINDOWED:
            first = tl.maximum(first_query + diagonal - window, 0) // KEYS * KEYS
        if WINDOWED or not EVEN:
            masked = first
        total, total_rest, q_rest = tl.zeros([QUERIES, WIDTH], tl.float32), q_block, q_block  # these two: of no use
        if REST:
            rest = q + WIDTH + _at(stride_q, row, head, q_start)
            q_rest = _block(rest, first_query, stride_q[2], queries, EVEN, QUERIES, REST)
            total_rest = tl.zeros([QUERIES, REST], tl.float32)
        if EVEN and not WINDOWED:
            total, total_rest = _add_keys(
                total, total_rest, q_block, q_rest, d_block, lse_row, delta_row, k_at, v_at, stride_k[2], stride_v[2],
                first, masked, query, queries, keys, diagonal, window, scale,
                False, CAUSAL, WINDOWED, EVEN, KEYS, WIDTH, REST,
            )  # fmt: skip
        if CAUSAL or WINDOWED or not EVEN:
            total, total_rest = _add_keys(
                total, total_rest, q_block, q_rest, d_block, lse_row, delta_row, k_at, v_at, stride_k[2], stride_v[2],
                masked, end, query, queries, keys, diagonal, window, scale,
                True, CAUSAL, WINDOWED, EVEN, KEYS, WIDTH, REST,
            )  # fmt: skip
        at = dq + _at(stride_dq, row, head, q_start) + query.to(tl.int64)[:, None] * stride_dq[2]
        tl.store(at + column, (total * factor).to(dq.dtype.element_ty), mask=is_query[:, None])
        if REST:
            at_rest = at + WIDTH + tl.arange(0, REST)[None, :]
            tl.store(at_rest, (total_rest * factor).to(dq.dtype.element_ty), mask=is_query[:, None])


class _Operands(NamedTuple):
    """As the kernels index them, [rows, heads, tokens, width]; packed rows are one."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    log2_lse: Tensor  # [rows, heads, tokens] float32 contiguous
    delta: Tensor

    @property
    def strides(self) -> list[tuple[int, ...]]:
        return [_stride(x) for x in self[:4]]


def attention_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, options: AttentionOptions
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv), each a [B, heads, S, D] view of [B, S, heads, D]; see `attention_partial`. The width of values
    is a power of two, and queries and keys are as wide or have a power of two of columns more."""
    operands = _operands(dout, q, k, v, out, lse, options)
    gradients = dq, dk, dv = _token_major(q), _token_major(k), _token_major(v)
    to_q, to_k, to_v = (_rows(x, options) for x in gradients)
    (rows, heads, queries, _), (_, groups, keys, width) = operands.q.shape, operands.v.shape
    rest = operands.q.shape[3] - width
    lengths, scale = options.lengths, float(options.scale)
    packed = lengths is not None
    cu_seqlens = (lengths.cu_seqlens_q, lengths.cu_seqlens_k) if lengths is not None else (lse, lse)
    segments = len(cu_seqlens[0]) - 1 if packed else rows
    longest = lengths.max_seqlens if lengths is not None else (queries, keys)
    numbers = (heads // groups, queries, keys, options.window_left or 0, scale * LOG2_E.value, scale)

    def flags(blocks: Blocks) -> dict[str, Any]:
        even = not packed and queries % blocks.QUERIES == 0 and keys % blocks.KEYS == 0
        windowed = options.window_left is not None
        return {
            "CAUSAL": options.causal,
            "WINDOWED": windowed,
            "PACKED": packed,
            "EVEN": even,
            "WIDTH": width,
            "REST": rest,
        }

    of_keys, of_queries = blocks_for(width, rest, q.device)
    _keys_and_values[(ceil_div(longest[1], of_keys.KEYS), groups, segments)](
        *operands, to_k, to_v, *cu_seqlens, *operands.strides, _stride(to_k), _stride(to_v), *numbers,
        **flags(of_keys), **of_keys._asdict(),
    )  # fmt: skip
    _queries[(ceil_div(longest[0], of_queries.QUERIES), heads, segments)](
        *operands, to_q, *cu_seqlens, *operands.strides, _stride(to_q), *numbers,
        **flags(of_queries), **of_queries._asdict(),
    )  # fmt: skip
    return dq, dk, dv


def blocks_for(width: int, rest: int, device: torch.device) -> tuple[Blocks, Blocks]:
    """The block sizes of the kernel of dk and dv, and of that of dq."""
    if width < 128:
        return Blocks(64, 64, 4, 3), Blocks(64, 64, 4, 3)
    needed = 200 if rest or width > 128 else 160  # KiB: an H100 has that, and an A100 the latter
    large = device.type != "cuda" or shared_memory(device) >= needed * 1024
    if width > 128:
        return Blocks(32, 64, 8, 2), Blocks(64, 64, 8, 2) if large else Blocks(64, 32, 8, 2)
    return Blocks(32, 64, 4, 3), Blocks(128, 64, 8, 3) if large else Blocks(64, 64, 4, 2)


def _operands(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, options: AttentionOptions
) -> _Operands:
    if options.lengths is not None:
        lse = lse.transpose(0, 1).flatten(1).unsqueeze(0)
    lse, q, k, v, dout, out = lse.float().contiguous(), *(_rows(x, options) for x in (q, k, v, dout, out))
    (rows, heads, queries, width), log2_lse, delta = dout.shape, torch.empty_like(lse), torch.empty_like(lse)
    _row_terms[(ceil_div(queries, ROWS), heads, rows)](
        dout, out, lse, log2_lse, delta, _stride(dout), _stride(out), heads, queries, ROWS, width
    )
    return _Operands(q, k, v, dout, log2_lse, delta)


def _rows(x: Tensor, options: AttentionOptions) -> Tensor:
    """[B, heads, S, D] with a contiguous last dimension; if packed [1, heads, B S, D]."""
    x = x if x.stride(3) == 1 else x.contiguous()
    return x if options.lengths is None else x.transpose(1, 2).flatten(0, 1).transpose(0, 1).unsqueeze(0)


def _token_major(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], x.shape[2], x.shape[1], x.shape[3]).transpose(1, 2)


def _stride(x: Tensor) -> tuple[int, ...]:
    return x.stride()[:3]
