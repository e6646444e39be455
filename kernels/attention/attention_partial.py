"""Attention of some queries to some of their keys: one part of an attention whose softmax covers more keys.

A part returns its output and its log-sum-exp (lse); attention_merge.py merges parts that share queries (blockwise
attention, arXiv 2310.01889). The backward of a part takes output and lse of the full attention: exp(s - lse) is then
the full probability, and the parts do not need each other.
"""

import math
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_cudnn_attention

from pentad.kernels.attention.attention_cudnn import attention_backward_in_order, part_of
from pentad.kernels.attention.attention_reference import (
    AttentionOptions,
    partial_attention_backward_reference,
    partial_attention_reference,
)
from pentad.kernels.attention.packed_runs import backward_by_runs, forward_by_runs
from pentad.kernels.backend import (
    KernelKey,
    choose_kernel,
    deterministic_algorithms,
    has_cudnn_frontend,
    kernels_name,
    shared_memory,
)

MAX_HEAD_DIM = 256  # of the flash kernels
# Head dims of queries and keys, and of values, for which Triton has kernels.
TRITON_HEAD_DIMS = {(32, 32), (64, 64), (128, 128)}
WIDE_HEAD_DIMS = {(192, 128), (256, 256)}  # only with as much shared memory as an A100 has
WIDE_SHARED_MEMORY = 160 * 1024  # bytes

QKVGrads = tuple[Tensor, Tensor, Tensor]  # of queries, keys and values


def partial_attention(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> tuple[Tensor, Tensor]:
    """(out [B, N, S, Dv], lse [B, N, S] in float32 or wider) of q [B, N, S, D], k [B, M, K, D] and v [B, M, K, Dv].

    Every query must see at least one key, unless its segment has none. On a GPU, 16-bit inputs take the kernel in use
    (kernels/backend.py); usually cuDNN's; where that does not support the shape, window or soft cap, ours in Triton or,
    for head dims that ours lack, flash attention. All other inputs take the reference, whose memory grows with S K.
    """
    if options.lengths is not None and options.lengths.runs:
        return forward_by_runs(partial_attention, options.lengths.runs, q, k, v, options)
    match _kernel(q, k, v, options):
        case "cudnn":
            return _cudnn(q, k, v, options)
        case "triton":
            from pentad.kernels.attention.attention_forward_triton import attention_forward  # imports Triton

            return attention_forward(q, k, v, options)
        case "flash":
            return _flash(q, k, v, options)
    return partial_attention_reference(q, k, v, options)


def partial_attention_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, options: AttentionOptions
) -> QKVGrads:
    """(dq, dk, dv) of this part, from `dout`, `out` and `lse` of the full attention for its queries.

    cuDNN is usually fastest, but as torch calls it, it sums dq in an order that changes from run to run; a fixed order
    takes its Python frontend (attention_cudnn.py). Next is Triton, which is deterministic, or, for other head dims and
    for heads of 256 where any order will do, flash attention, which has a deterministic mode.
    """
    if options.lengths is not None and options.lengths.runs:
        runs = options.lengths.runs
        return backward_by_runs(partial_attention_backward, runs, dout, q, k, v, out, lse, options)
    match _kernel(q, k, v, options, backward=True):
        case "cudnn":
            backward = attention_backward_in_order if options.deterministic else _cudnn_backward
            return backward(dout, q, k, v, out, lse, options)
        case "triton":
            from pentad.kernels.attention.attention_backward_triton import attention_backward  # imports Triton

            return attention_backward(dout, q, k, v, out, lse, options)
        case "flash":
            with deterministic_algorithms() if options.deterministic else nullcontext():
                return _flash_backward(dout, q, k, v, out, lse, options)
    return partial_attention_backward_reference(dout, q, k, v, out, lse, options)


def _kernel(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions, *, backward: bool = False) -> str:
    """The kernel to run. Raises ValueError if that is to be cuDNN's, and it does not serve the call."""
    serving = serving_kernels(q, k, v, options, backward=backward)
    if kernels_name() == "cudnn" and "cudnn" not in serving:
        found = f"queries {tuple(q.shape)}, keys {tuple(k.shape)} and values {tuple(v.shape)} of {q.dtype}"
        raise ValueError(f"kernels are cudnn, which has no attention for {found}: expected auto or triton")
    return choose_kernel(serving, attention_key(q, k, v, options, backward=backward))


def serving_kernels(
    q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions, *, backward: bool = False
) -> tuple[str, ...]:
    """The implementations that serve a call, of which the first is usually the fastest: 'cudnn', 'triton', 'flash', or
    only 'torch', the reference."""
    if kernels_name() == "torch" or not has_fused_kernel(q, v, options.softcap):
        return ("torch",)
    in_order = backward and options.deterministic
    fused = ("triton",) if has_triton_kernels(q, v) else ()
    if not options.softcap:
        is_first = backward and not in_order and v.shape[3] == MAX_HEAD_DIM
        fused = ("flash", *fused) if is_first else (*fused, "flash")
    supports = _cudnn_supports_in_order if in_order else _cudnn_supports
    return ("cudnn", *fused) if supports(q, k, v, options) else fused


def attention_key(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions, *, backward: bool = False) -> KernelKey:
    """The key of causal attention to whole sequences or packed documents: operation, heads, key-value heads and their
    widths. It is () for all other calls, which are not measured."""
    if not options.causal or options.window_left is not None or options.softcap or q.shape[2] != k.shape[2]:
        return ()
    packed = "packed_" if options.lengths is not None else ""
    phase = "_backward" * backward + "_deterministic" * (backward and options.deterministic)
    return f"{packed}attention{phase}", q.shape[1], k.shape[1], q.shape[3], v.shape[3]


def has_fused_kernel(q: Tensor, v: Tensor, softcap: float = 0.0) -> bool:
    """Whether fused kernels support the device, dtype and head dims."""
    is_fused = q.is_cuda and q.dtype in (torch.bfloat16, torch.float16) and max(q.shape[3], v.shape[3]) <= MAX_HEAD_DIM
    return is_fused and (not softcap or has_triton_kernels(q, v))


def has_triton_kernels(q: Tensor, v: Tensor) -> bool:
    """Whether our Triton kernels serve the head dims."""
    dims = q.shape[3], v.shape[3]
    return dims in TRITON_HEAD_DIMS or (dims in WIDE_HEAD_DIMS and shared_memory(q.device) >= WIDE_SHARED_MEMORY)


def _cudnn_supports(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> bool:
    if not _is_plain(q, k, options):
        return False
    return can_use_cudnn_attention(SDPAParams(q, k, v, None, 0.0, options.causal, q.shape[1] != k.shape[1]))


def _cudnn_supports_in_order(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> bool:
    return has_cudnn_frontend() and _is_plain(q, k, options) and part_of(q, k, v) is not None


def _is_plain(q: Tensor, k: Tensor, options: AttentionOptions) -> bool:
    """Whether a call needs nothing that cuDNN lacks, whose causal mask is aligned at the first key."""
    aligned = not options.causal or q.shape[2] == k.shape[2]
    is_plain = options.lengths is None and options.window_left is None and not options.softcap
    return is_plain and options.fixed_shape and aligned


def _cudnn(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> tuple[Tensor, Tensor]:
    call = torch.ops.aten._scaled_dot_product_cudnn_attention.default
    out, lse, *_ = call(q, k, v, None, True, 0.0, options.causal, False, scale=options.scale)
    return out, lse.view(q.shape[:3])


def _cudnn_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, options: AttentionOptions
) -> QKVGrads:
    seed = torch.empty((), dtype=torch.int64, device=q.device)  # of unused dropout
    call = torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default
    stats = lse.contiguous().unsqueeze(3) if _stats_are_columns() else lse.contiguous()
    sizes = None, None, q.shape[2], k.shape[2]
    dout, out = _in_layout_of(q, dout), _in_layout_of(q, out)
    dq, dk, dv = call(dout, q, k, v, out, stats, seed, seed, None, *sizes, 0.0, options.causal, scale=options.scale)
    return dq, dk, dv


def _in_layout_of(q: Tensor, x: Tensor) -> Tensor:
    """`x` without gaps and with its dimensions in q's order in memory, as cuDNN returns its output.

    Torch (2.11) caches cuDNN plans by the strides of q, k and v only, and would run the plan of another layout of out
    and dout: dq and dk are then wrong by 10 % and more.
    """
    strides = torch.empty_like(q[..., : x.shape[3]], device="meta").stride()
    same = all(size == 1 or a == b for size, a, b in zip(x.shape, x.stride(), strides, strict=True))
    return x if same else torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device).copy_(x)


@cache
def _stats_are_columns() -> bool:
    """Whether this version of torch represents cuDNN's lse as [B, N, S, 1] instead of [B, N, S]."""
    q = torch.empty(1, 1, 8, 8, dtype=torch.bfloat16, device="meta")
    lse = torch.ops.aten._scaled_dot_product_cudnn_attention.default(q, q, q, None, True)[1]
    return bool(lse.dim() == 4)


def _flash(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> tuple[Tensor, Tensor]:
    width, packed = _padded_width(q, v), options.lengths is not None
    tokens = (_token_major(x, width, packed) for x in (q, k, v))
    call = torch.ops.aten._flash_attention_forward.default
    out, lse, *_ = call(*tokens, *_seqlens(q, k, options), 0.0, options.causal, False, **_scores_options(options))
    if packed:  # lse [N, B S]
        lse = lse.view(q.shape[1], q.shape[0], q.shape[2]).transpose(0, 1)
        lse = lse.masked_fill(lse == math.inf, -math.inf)  # of queries that see no key
    return _head_major(out, q, v.shape[3]), lse


def _flash_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, options: AttentionOptions
) -> QKVGrads:
    width, packed = _padded_width(q, v), options.lengths is not None
    tokens = (_token_major(x, width, packed) for x in (dout, q, k, v, out))
    lse = (lse.transpose(0, 1).flatten(1) if packed else lse).contiguous()
    seed = torch.empty(2, dtype=torch.uint64, device=q.device)  # of unused dropout
    unused = torch.empty(0, device=q.device)
    call = torch.ops.aten._flash_attention_backward.default
    sizes = _seqlens(q, k, options)
    dq, dk, dv = call(*tokens, lse, *sizes, 0.0, options.causal, seed, unused, **_scores_options(options))
    return _head_major(dq, q, q.shape[3]), _head_major(dk, k, k.shape[3]), _head_major(dv, v, v.shape[3])


def _scores_options(options: AttentionOptions) -> dict[str, Any]:
    return {"scale": options.scale, "window_size_left": options.window_left}


def _padded_width(q: Tensor, v: Tensor) -> int:
    """The flash kernels need one head dim for all, a multiple of eight; zero columns change nothing."""
    return -(-max(q.shape[3], v.shape[3]) // 8) * 8


def _token_major(x: Tensor, width: int, packed: bool) -> Tensor:
    """[B, heads, S, D] as [B, S, heads, width], or [B S, heads, width] if packed."""
    x = x.transpose(1, 2)
    x = F.pad(x, (0, width - x.shape[3])) if x.shape[3] < width else x
    return x.flatten(0, 1) if packed else x


def _head_major(x: Tensor, like: Tensor, width: int) -> Tensor:
    """The inverse of `_token_major`: [B, heads, S, width], with B, heads and S of `like`."""
    return x.view(like.shape[0], like.shape[2], like.shape[1], -1)[..., :width].contiguous().transpose(1, 2)


def _seqlens(q: Tensor, k: Tensor, options: AttentionOptions) -> tuple[Tensor | None, Tensor | None, int, int]:
    if options.lengths is None:
        return None, None, q.shape[2], k.shape[2]
    return options.lengths.cu_seqlens_q, options.lengths.cu_seqlens_k, *options.lengths.max_seqlens
