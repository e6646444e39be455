"""What the kernels of attention's forward and backward share: segments, which pairs are visible, scores and blocks."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from pentad.kernels.attention.attention_reference import AttentionOptions

LOG2_E = tl.constexpr(1.4426950408889634)
SHORT_SEGMENT = 1024  # tokens; where all have fewer, loops over blocks without a mask cost more than they save


class Blocks(NamedTuple):
    """Queries and keys of a program's step, and how it runs. Those in use were the fastest of some ten on one H200."""

    QUERIES: int
    KEYS: int
    num_warps: int
    num_stages: int


# Not specialized: lengths of 1 would become constants, which have no methods. Strides are those of (row, head, token).
NUMBERS = ("LENGTH_Q", "LENGTH_K", "window", "HEADS", "LENGTH")


@triton.jit
def segment_of(cu_seqlens, number, LENGTH, PACKED: tl.constexpr):
    """(first token, length) of a segment; without packing, each row is one."""
    start, length = 0, LENGTH
    if PACKED:
        start = tl.load(cu_seqlens + number)
        length = tl.load(cu_seqlens + number + 1) - start
    return start, length


@triton.jit
def visible(
    query, key, queries, keys, diagonal, window,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Which (query, key) pairs are visible. Under a causal mask, keys past the last one come after every query."""
    seen = query >= 0
    if not EVEN:
        seen = seen & (query < queries) & (key < keys)
    if CAUSAL:
        seen = seen & (key <= query + diagonal)
    if WINDOWED:
        seen = seen & (key >= query + diagonal - window)
    return seen


@triton.jit
def keys_of(
    first_query, queries, keys, diagonal, window,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, SHORT: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """(first, inner, outer, end): a block of queries sees keys from `first` to before `end`, in blocks, and each of its
    queries sees all those from `inner` to before `outer`. For short segments these are none: see `SHORT_SEGMENT`."""
    first, inner, outer, end = 0, 0, keys // KEYS * KEYS, keys
    if CAUSAL:
        end = tl.minimum(keys, first_query + QUERIES + diagonal)
        outer = tl.maximum((first_query + diagonal + 1) // KEYS * KEYS, 0)
    if WINDOWED:
        first = tl.maximum(first_query + diagonal - window, 0) // KEYS * KEYS
        outer = tl.maximum(outer, first)
        inner = tl.maximum(tl.cdiv(first_query + QUERIES - 1 + diagonal - window, KEYS) * KEYS, first)
        inner = tl.minimum(inner, outer)
    if SHORT:
        inner, outer = first, first
    return first, inner, outer, end


@triton.jit
def queries_of(
    first_key, queries, keys, diagonal, window,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, SHORT: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Like `keys_of`, for a block of keys: the queries that see some of them, and those that see all of them."""
    first, inner, outer, end = 0, 0, queries // QUERIES * QUERIES, queries
    if CAUSAL:
        first = tl.maximum(first_key - diagonal, 0) // QUERIES * QUERIES
        inner = tl.maximum(tl.cdiv(first_key + KEYS - 1 - diagonal, QUERIES) * QUERIES, first)
    if WINDOWED:
        end = tl.minimum(queries, first_key + KEYS - diagonal + window)
        outer = tl.minimum(outer, (first_key + 1 - diagonal + window) // QUERIES * QUERIES)
    inner = tl.minimum(inner, end)
    outer = tl.maximum(outer, inner)
    if SHORT:
        inner, outer = first, first
    return first, inner, outer, end


@triton.jit
def capped(scores):
    """tanh(x), for `scores` = 2 x log2(e)."""
    return 1.0 - 2.0 / (1.0 + tl.exp2(scores))


@triton.jit
def tokens_of(x, stride, row, head, start):
    """Where a segment's first token is."""
    return x + row * stride[0] + tl.cast(head, tl.int64) * stride[1] + tl.cast(start, tl.int64) * stride[2]


@triton.jit
def block_of(x, start, stride, limit, EVEN: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Rows of `x` from `start` on, zeros from `limit` on. Only the offset of the first needs 64 bits."""
    row = tl.arange(0, ROWS)[:, None]
    first = x + tl.cast(start, tl.int64) * stride + row * stride + tl.arange(0, WIDTH)[None, :]
    return tl.load(first) if EVEN else tl.load(first, mask=start + row < limit, other=0)


class Scores(NamedTuple):
    """`scale` turns products of queries and keys into scores to base 2; with a soft cap, it multiplies `capped` of the
    products times `cap_scale`."""

    scale: float
    cap_scale: float


def scores_of(options: AttentionOptions) -> Scores:
    log2_e, cap = LOG2_E.value, options.softcap
    return Scores(log2_e * cap, 2 * log2_e * options.scale / cap) if cap else Scores(log2_e * options.scale, 0.0)


class Segments(NamedTuple):
    """`number` segments. Without packing, they are the rows, and `cu_seqlens` is not used."""

    cu_seqlens: tuple[Tensor, Tensor]
    number: int
    longest: tuple[int, int]  # of the queries and of the keys


def segments_of(options: AttentionOptions, q: Tensor, k: Tensor) -> Segments:
    """The segments of q and k as the kernels index them (`rows_of`)."""
    if options.lengths is None:
        return Segments((q, q), q.shape[0], (q.shape[2], k.shape[2]))
    of_queries, of_keys, longest, _ = options.lengths
    return Segments((of_queries, of_keys), len(of_queries) - 1, longest)


def flags_of(options: AttentionOptions, blocks: Blocks, q: Tensor, v: Tensor) -> dict[str, Any]:
    """What a kernel is compiled for, by q and v as it indexes them."""
    lengths, width = options.lengths, v.shape[3]
    return {
        "CAUSAL": options.causal,
        "WINDOWED": options.window_left is not None,
        "CAPPED": options.softcap > 0,
        "PACKED": lengths is not None,
        "SHORT": lengths is not None and max(lengths.max_seqlens) < SHORT_SEGMENT,
        "EVEN": lengths is None and q.shape[2] % blocks.QUERIES == 0 and v.shape[2] % blocks.KEYS == 0,
        "WIDTH": width,
        "REST": q.shape[3] - width,
    }


def rows_of(x: Tensor, options: AttentionOptions) -> Tensor:
    """[B, heads, S, D] with a contiguous last dimension; if packed [1, heads, B S, D]."""
    x = x if x.stride(3) == 1 else x.contiguous()
    return x if options.lengths is None else x.transpose(1, 2).flatten(0, 1).transpose(0, 1).unsqueeze(0)


def token_major(x: Tensor, width: int) -> Tensor:
    """Memory for [B, heads, S, width], with heads of a token side by side."""
    return x.new_empty(x.shape[0], x.shape[2], x.shape[1], width).transpose(1, 2)


def stride_of(x: Tensor) -> tuple[int, ...]:
    return x.stride()[:3]
