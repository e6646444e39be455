"""How long the implementations of attention and of grouped expert products take (precision.kernels)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pentad.kernels.attention.attention_partial import (
    attention_key,
    partial_attention,
    partial_attention_backward,
    serving_kernels,
)
from pentad.kernels.attention.attention_reference import AttentionOptions, softmax_scale
from pentad.kernels.attention.packed_runs import PackedLengths
from pentad.kernels.backend import KernelKey, KernelsInUse, has_cudnn_frontend, use_kernels
from pentad.kernels.moe.grouped_gemm import grouped_gemm
from pentad.workers.health.device_rates import Clock, Tensors, Work, routed_offsets

Shape = tuple[str, Sequence[int]]  # op and sizes, as in KernelTimes
DOCUMENTS = 8  # in a packed sequence, all of the same length


class Call(NamedTuple):
    serving: tuple[str, ...]  # implementations, the usual one first
    key: KernelKey
    work: Work


def measure_kernels(
    shapes: Sequence[Shape], new: Tensors, clock: Clock, done: Callable[[], None] = lambda: None
) -> list[dict[str, Any]]:
    """The KernelTimes of these calls, as plain data; calls `done` after each."""
    found = []
    for op, sizes in shapes:
        call = (_grouped if op.startswith("grouped") else _attention)(op, sizes, new)
        seconds = []
        for kernel in call.serving:
            before = use_kernels(KernelsInUse(measured={call.key: kernel}, cudnn_frontend=has_cudnn_frontend()))
            try:
                seconds.append((kernel, clock.seconds(call.work)))
            finally:
                use_kernels(before)
        found.append({"op": op, "sizes": sizes, "seconds": seconds})
        done()
    return found


def _attention(op: str, sizes: Sequence[int], new: Tensors) -> Call:
    rows, length, heads, kv_heads, width, value = sizes
    parts = ((heads, width), (kv_heads, width), (kv_heads, value), (heads, value))
    q, k, v, dout = (new(rows, length, count, each).transpose(1, 2) for count, each in parts)
    lengths = _documents(rows * length, length, new.device) if op.startswith("packed") else None
    backward, deterministic = "_backward" in op, op.endswith("_deterministic")
    options = AttentionOptions(True, softmax_scale(q, None), deterministic, lengths)
    serving = serving_kernels(q, k, v, options, backward=backward)
    key = attention_key(q, k, v, options, backward=backward)
    if not backward:
        return Call(serving, key, lambda: partial_attention(q, k, v, options))
    out, lse = partial_attention(q, k, v, options)
    return Call(serving, key, lambda: partial_attention_backward(dout, q, k, v, out, lse, options))


def _documents(tokens: int, length: int, device: torch.device) -> PackedLengths:
    size = -(-length // DOCUMENTS)
    ends = torch.tensor([*range(0, tokens, size), tokens], dtype=torch.int32, device=device)
    return PackedLengths(ends, ends, (size, size))


def _grouped(op: str, sizes: Sequence[int], new: Tensors) -> Call:
    from pentad.kernels.moe.grouped_gemm_triton import grouped_key, serving_kernels  # imports Triton

    rows, experts, n, k = sizes
    x, weights = new(rows, k), _matrices(experts, n, k, new, transposed=op.endswith("_transposed"))
    offsets = routed_offsets(rows, experts, new.device)
    return Call(serving_kernels(x, weights), grouped_key(weights), lambda: grouped_gemm(x, weights, offsets))


def _matrices(experts: int, n: int, k: int, new: Callable[..., Tensor], *, transposed: bool) -> Tensor:
    return new(experts, k, n).transpose(1, 2) if transposed else new(experts, n, k)
