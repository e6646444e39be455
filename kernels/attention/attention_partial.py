"""Attention of some queries to some keys, as one part of an attention whose softmax runs over more keys than these.

A part gives its output and the logarithm of its softmax's denominator (lse); `merge_partials_` joins parts that share
queries (blockwise attention, arXiv 2310.01889). The backward pass of a part takes output and lse of the whole: p =
exp(s - lse) is then the whole's probability, and no part needs another.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache

import torch
import torch.nn.functional as F
import torch.utils.deterministic as determinism
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_cudnn_attention

from pentad.kernels.attention.attention_reference import (
    AttentionOptions,
    partial_attention_backward_reference,
    partial_attention_reference,
)
from pentad.kernels.backend import runs_in_triton

WIDEST = 256  # head of the flash kernels
# A property that torch puts on its module at run time, where no type checker sees it.
FILL = "fill_uninitialized_memory"

QKVGrads = tuple[Tensor, Tensor, Tensor]  # of queries, keys and values


def partial_attention(q: Tensor, k: Tensor, v: Tensor, rule: AttentionOptions) -> tuple[Tensor, Tensor]:
    """(out [B, N, S, Dv], lse [B, N, S] in float32 or wider) of q [B, N, S, D], k [B, M, K, D] and v [B, M, K, Dv].

    Every query has to see a key. On a GPU 16-bit inputs take cuDNN or, where its backward pass would not be repeatable
    or does not know the shape, flash attention; all else is written out, and its memory grows with S K.
    """
    if not has_fused_kernel(q, v):
        return partial_attention_reference(q, k, v, rule)
    return _cudnn(q, k, v, rule) if _cudnn_takes(q, k, v, rule) else _flash(q, k, v, rule)


def partial_attention_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, rule: AttentionOptions
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) of this part alone, where `dout`, `out` and `lse` are those of the whole for its queries."""
    if not has_fused_kernel(q, v):
        return partial_attention_backward_reference(dout, q, k, v, out, lse, rule)
    if _cudnn_takes(q, k, v, rule):
        return _cudnn_backward(dout, q, k, v, out, lse, rule)
    with deterministic_algorithms() if rule.deterministic else nullcontext():
        return _flash_backward(dout, q, k, v, out, lse, rule)


def merge_partials_reference_(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> None:
    """The formula of `merge_partials_` in torch operations, for any dtype and device."""
    share = torch.sigmoid(more_lse - lse)  # of the part in the new denominator
    out.lerp_(more.to(out.dtype), share.unsqueeze(-1))
    torch.logaddexp(lse, more_lse, out=lse)


def merge_partials_(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> None:
    """Adds a part, `more` and `more_lse`, to the sum of others in place: out [B, N, S, D], whose last dimension is
    contiguous, and lse [B, N, S] are float32 or wider."""
    if runs_in_triton(out):
        from pentad.kernels.attention import attention_triton

        attention_triton.merge_partials_(out, lse, more, more_lse)
    else:
        merge_partials_reference_(out, lse, more, more_lse)


def has_fused_kernel(q: Tensor, v: Tensor) -> bool:
    """True where fused kernels take dtype and widths; they need a GPU."""
    return q.is_cuda and q.dtype in (torch.bfloat16, torch.float16) and max(q.shape[3], v.shape[3]) <= WIDEST


@contextmanager
def deterministic_algorithms(where_none: str = "error") -> Iterator[None]:
    """Asks torch for reproducible algorithms, without its habit of filling fresh memory; `where_none` says what it does
    about an operation that has none: "warn" or "error"."""
    mode = torch.get_deterministic_debug_mode()
    fill = getattr(determinism, FILL)
    torch.set_deterministic_debug_mode(where_none)
    setattr(determinism, FILL, False)
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(mode)
        setattr(determinism, FILL, fill)


def _cudnn_takes(q: Tensor, k: Tensor, v: Tensor, rule: AttentionOptions) -> bool:
    """Its causal mask counts from the first key, and it adds up dq in an order that changes from run to run."""
    aligned = not rule.causal or q.shape[2] == k.shape[2]
    if rule.deterministic or rule.lengths is not None or not rule.steady or not aligned:
        return False
    return can_use_cudnn_attention(SDPAParams(q, k, v, None, 0.0, rule.causal, q.shape[1] != k.shape[1]))


def _cudnn(q: Tensor, k: Tensor, v: Tensor, rule: AttentionOptions) -> tuple[Tensor, Tensor]:
    call = torch.ops.aten._scaled_dot_product_cudnn_attention.default
    out, lse, *_ = call(q, k, v, None, True, 0.0, rule.causal, False, scale=rule.scale)
    return out, lse.view(q.shape[:3])


def _cudnn_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, rule: AttentionOptions
) -> QKVGrads:
    seed = torch.empty((), dtype=torch.int64, device=q.device)  # of a dropout that is not there
    call = torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default
    stats = lse.contiguous().unsqueeze(3) if _stats_are_columns() else lse.contiguous()
    sizes = None, None, q.shape[2], k.shape[2]
    dout, out = _laid_as(q, dout), _laid_as(q, out)
    dq, dk, dv = call(dout, q, k, v, out, stats, seed, seed, None, *sizes, 0.0, rule.causal, scale=rule.scale)
    return dq, dk, dv


def _laid_as(q: Tensor, x: Tensor) -> Tensor:
    """`x` without gaps and with dimensions in the order of q's, as cuDNN makes its output.

    Torch (2.11) keeps cuDNN's plans by the strides of q, k and v alone, and so runs the plan of another layout of out
    and dout where it has one: dq and dk are then wrong, by a tenth and more.
    """
    strides = torch.empty_like(q[..., : x.shape[3]], device="meta").stride()
    same = all(size == 1 or a == b for size, a, b in zip(x.shape, x.stride(), strides, strict=True))
    return x if same else torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device).copy_(x)


@cache
def _stats_are_columns() -> bool:
    """Whether this torch has cuDNN's lse as [B, N, S, 1], not as [B, N, S]."""
    q = torch.empty(1, 1, 8, 8, dtype=torch.bfloat16, device="meta")
    lse = torch.ops.aten._scaled_dot_product_cudnn_attention.default(q, q, q, None, True)[1]
    return bool(lse.dim() == 4)


def _flash(q: Tensor, k: Tensor, v: Tensor, rule: AttentionOptions) -> tuple[Tensor, Tensor]:
    width, packed = _width(q, v), rule.lengths is not None
    tokens = (_tokens(x, width, packed) for x in (q, k, v))
    call = torch.ops.aten._flash_attention_forward.default
    out, lse, *_ = call(*tokens, *_sizes(q, k, rule), 0.0, rule.causal, False, scale=rule.scale)
    if packed:  # lse [N, T]
        lse = lse.view(q.shape[1], q.shape[0], q.shape[2]).transpose(0, 1)
    return _heads(out, q, v), lse


def _flash_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, rule: AttentionOptions
) -> QKVGrads:
    width, packed = _width(q, v), rule.lengths is not None
    dout, queries, keys, values, out = (_tokens(x, width, packed) for x in (dout, q, k, v, out))
    sums = (lse.transpose(0, 1).flatten(1) if packed else lse).contiguous()
    seed = torch.empty(2, dtype=torch.uint64, device=q.device)  # of a dropout that is not there
    unused = torch.empty(0, device=q.device)
    call = torch.ops.aten._flash_attention_backward.default
    dq, dk, dv = call(
        dout, queries, keys, values, out, sums, *_sizes(q, k, rule), 0.0, rule.causal, seed, unused, scale=rule.scale
    )
    return _heads(dq, q, q), _heads(dk, k, k), _heads(dv, v, v)


def _width(q: Tensor, v: Tensor) -> int:
    """The flash kernels want one width for all, in steps of eight; columns of zeros change nothing."""
    return -(-max(q.shape[3], v.shape[3]) // 8) * 8


def _tokens(x: Tensor, width: int, packed: bool) -> Tensor:
    """[B, S, heads, width], or [B S, heads, width]."""
    x = x.transpose(1, 2)
    x = F.pad(x, (0, width - x.shape[3])) if x.shape[3] < width else x
    return x.flatten(0, 1) if packed else x


def _heads(x: Tensor, like: Tensor, width: Tensor) -> Tensor:
    """What `_tokens` made of [B, heads, S, D], without the columns it added."""
    return x.view(like.shape[0], like.shape[2], like.shape[1], -1)[..., : width.shape[3]].contiguous().transpose(1, 2)


def _sizes(q: Tensor, k: Tensor, rule: AttentionOptions) -> tuple[Tensor | None, Tensor | None, int, int]:
    if rule.lengths is None:
        return None, None, q.shape[2], k.shape[2]
    return rule.lengths.queries, rule.lengths.keys, *rule.lengths.longest
