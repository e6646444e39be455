"""The forward of attention in Triton: packed segments, windows and soft caps (FlashAttention-2, arXiv 2307.08691)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pentad.kernels.attention.attention_blocks_triton import (
    NUMBERS,
    Blocks,
    block_of,
    capped,
    flags_of,
    keys_of,
    rows_of,
    scores_of,
    segment_of,
    segments_of,
    stride_of,
    token_major,
    tokens_of,
    visible,
)
from pentad.kernels.attention.attention_reference import AttentionOptions
from pentad.kernels.backend import ceil_div, shared_memory

LN_2 = tl.constexpr(0.6931471805599453)
LOWEST = tl.constexpr(-1e30)  # below every score, and finite: its difference from itself is 0


@triton.jit
def _add_keys(
    total, weight, most, q_block, q_rest, k, v, stride_k, stride_v, first, end, query, queries, keys, diagonal, window,
    scale, cap_scale, MASKED: tl.constexpr, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr,
    EVEN: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """(sum of values, sum of weights, largest score) of queries, with the keys from `first` to before `end` added."""
    for start in range(first, end, KEYS):
        key = start + tl.arange(0, KEYS)
        k_block = block_of(k, start, stride_k, keys, EVEN, KEYS, WIDTH)
        scores = tl.dot(q_block, tl.trans(k_block))
        if REST:
            k_rest = block_of(k + WIDTH, start, stride_k, keys, EVEN, KEYS, REST)
            scores = tl.dot(q_rest, tl.trans(k_rest), scores)
        if CAPPED:
            scores = capped(scores * cap_scale)
        if MASKED:
            seen = visible(query[:, None], key[None, :], queries, keys, diagonal, window, CAUSAL, WINDOWED, EVEN)
            scores = tl.where(seen, scores, float("-inf"))
        larger = tl.maximum(most, tl.max(scores, 1) * scale)
        p, shrink = tl.exp2(scores * scale - larger[:, None]), tl.exp2(most - larger)
        weight, most = weight * shrink + tl.sum(p, 1), larger
        v_block = block_of(v, start, stride_v, keys, EVEN, KEYS, WIDTH)
        total = tl.dot(p.to(v_block.dtype), v_block, total * shrink[:, None])
    return total, weight, most


@triton.jit(do_not_specialize=NUMBERS)
def _attend(
    q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, stride_q, stride_k, stride_v, stride_out,
    GROUP, LENGTH_Q, LENGTH_K, window, scale, cap_scale,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr, PACKED: tl.constexpr, SHORT: tl.constexpr,
    EVEN: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """A block of queries of one head. The last block sees most keys under a causal mask, so it comes first."""
    head, segment = tl.program_id(1), tl.program_id(2)
    q_start, queries = segment_of(cu_seqlens_q, segment, LENGTH_Q, PACKED)
    k_start, keys = segment_of(cu_seqlens_k, segment, LENGTH_K, PACKED)
    first_query, diagonal = (tl.num_programs(0) - 1 - tl.program_id(0)) * QUERIES, keys - queries
    row = tl.cast(0 if PACKED else segment, tl.int64)
    if first_query < queries:
        query, column = first_query + tl.arange(0, QUERIES), tl.arange(0, WIDTH)[None, :]
        is_query = (query < queries) | EVEN
        q_at = tokens_of(q, stride_q, row, head, q_start)
        q_block = block_of(q_at, first_query, stride_q[2], queries, EVEN, QUERIES, WIDTH)
        q_rest = q_block  # placeholder
        if REST:
            q_rest = block_of(q_at + WIDTH, first_query, stride_q[2], queries, EVEN, QUERIES, REST)
        k_at = tokens_of(k, stride_k, row, head // GROUP, k_start)
        v_at = tokens_of(v, stride_v, row, head // GROUP, k_start)
        first, inner, outer, end = keys_of(
            first_query, queries, keys, diagonal, window, CAUSAL, WINDOWED, SHORT, QUERIES, KEYS
        )
        total, weight = tl.zeros([QUERIES, WIDTH], tl.float32), tl.zeros([QUERIES], tl.float32)
        most = tl.full([QUERIES], LOWEST, tl.float32)
        if WINDOWED and not SHORT:
            total, weight, most = _add_keys(
                total, weight, most, q_block, q_rest, k_at, v_at, stride_k[2], stride_v[2],
                first, inner, query, queries, keys, diagonal, window, scale, cap_scale,
                True, CAUSAL, WINDOWED, CAPPED, EVEN, KEYS, WIDTH, REST,
            )  # fmt: skip
        if not SHORT:
            total, weight, most = _add_keys(
                total, weight, most, q_block, q_rest, k_at, v_at, stride_k[2], stride_v[2],
                inner, outer, query, queries, keys, diagonal, window, scale, cap_scale,
                False, CAUSAL, WINDOWED, CAPPED, True, KEYS, WIDTH, REST,
            )  # fmt: skip
        if CAUSAL or not EVEN:
            total, weight, most = _add_keys(
                total, weight, most, q_block, q_rest, k_at, v_at, stride_k[2], stride_v[2],
                outer, end, query, queries, keys, diagonal, window, scale, cap_scale,
                True, CAUSAL, WINDOWED, CAPPED, EVEN, KEYS, WIDTH, REST,
            )  # fmt: skip
        seen = weight > 0  # false for queries of a segment without keys
        weight = tl.where(seen, weight, 1.0)
        to_out = tokens_of(out, stride_out, row, head, q_start) + query.to(tl.int64)[:, None] * stride_out[2]
        tl.store(to_out + column, (total / weight[:, None]).to(out.dtype.element_ty), mask=is_query[:, None])
        to_lse = lse + (row * tl.num_programs(1) + head) * LENGTH_Q + q_start + query
        tl.store(to_lse, tl.where(seen, (most + tl.log2(weight)) * LN_2, float("-inf")), mask=is_query)


def attention_forward(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> tuple[Tensor, Tensor]:
    """(out, a [B, heads, S, D] view of [B, S, heads, D]; lse [B, heads, S] float32); see `attention_partial`. The width
    of values is a power of two, and queries and keys are equally wide or wider by a power of two."""
    out = token_major(q, v.shape[3])
    of_q, of_k, of_v, of_out = (rows_of(x, options) for x in (q, k, v, out))
    rows, heads, queries, wide = of_q.shape
    _, groups, keys, width = of_v.shape
    lse = torch.empty(rows, heads, queries, dtype=torch.float32, device=q.device)
    segments, scores = segments_of(options, of_q, of_k), scores_of(options)
    blocks = forward_blocks(width, wide - width, q.device)
    _attend[(ceil_div(segments.longest[0], blocks.QUERIES), heads, segments.number)](
        of_q, of_k, of_v, of_out, lse, *segments.cu_seqlens, *(stride_of(x) for x in (of_q, of_k, of_v, of_out)),
        heads // groups, queries, keys, options.window_left or 0, scores.scale, scores.cap_scale,
        **flags_of(options, blocks, of_q, of_v), **blocks._asdict(),
    )  # fmt: skip
    if options.lengths is not None:
        lse = lse.view(heads, q.shape[0], q.shape[2]).transpose(0, 1)
    return out, lse


def forward_blocks(width: int, rest: int, device: torch.device) -> Blocks:
    """The block sizes of the kernel."""
    kib = shared_memory(device) // 1024 if device.type == "cuda" else 0
    if width > 128:
        return Blocks(128, 64, 8, 2) if kib >= 200 else Blocks(64, 32, 4, 3)
    if rest:
        return Blocks(128, 64, 8, 3) if kib >= 200 else Blocks(64, 64, 4, 2)
    return Blocks(64, 64, 4, 3) if width < 128 or kib >= 120 else Blocks(64, 32, 4, 3)
