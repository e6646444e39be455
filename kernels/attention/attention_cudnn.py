"""cuDNN's deterministic backward of attention, which only its Python frontend (nvidia-cudnn-frontend) offers: torch
refuses cuDNN when it is asked for deterministic algorithms.

On Hopper that backward keeps the gradients of all probabilities of a call before it sums dq. So a call has only as many
sequences, or key-value heads of one sequence, as fit into `WORKSPACE` bytes.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pentad.kernels.attention.attention_reference import AttentionOptions, joined_gradients
from pentad.kernels.backend import ceil_div

WORKSPACE = 2 * 2**30  # bytes that the gradients of probabilities take at most
TILE = 128  # queries and keys of a tile in which they are stored
HEAD_DIM = 128  # at most, of queries and of values, in multiples of 8
WIDE_HEAD_DIMS = {(192, 128), (256, 256)}  # and these


def frontend() -> Any:
    """The frontend's module, whose import takes a second."""
    return import_module("cudnn")


class Part(NamedTuple):
    """How much of a call to attention cuDNN computes at a time."""

    rows: int
    kv_heads: int


def part_of(q: Tensor, k: Tensor, v: Tensor) -> Part | None:
    """None if one key-value head has too many probabilities, or heads are too wide."""
    (rows, heads, queries, width), (_, kv_heads, keys, value) = q.shape, v.shape
    narrow = max(width, value) <= HEAD_DIM and width % 8 == value % 8 == 0
    if not narrow and (width, value) not in WIDE_HEAD_DIMS:
        return None
    size = 2 * heads // kv_heads * (ceil_div(queries, TILE) * TILE) * (ceil_div(keys, TILE) * TILE)
    if size * kv_heads > WORKSPACE:
        return Part(1, count) if (count := _most(kv_heads, size)) else None
    return Part(_most(rows, size * kv_heads), kv_heads)


def _most(number: int, size: int) -> int:
    """The largest divisor of `number` such that this many pieces of `size` bytes fit into the workspace, or 0."""
    return next((count for count in range(number, 0, -1) if number % count == 0 and count * size <= WORKSPACE), 0)


def attention_backward_in_order(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, options: AttentionOptions
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv), each a [B, heads, S, D] view of [B, S, heads, D]; see `attention_partial`. `part_of` these must not
    be None."""
    part = part_of(q, k, v)
    assert part is not None
    dout, out = (x if x.stride(3) == 1 else x.contiguous() for x in (dout, out))
    gradients = joined_gradients(q, k, v)
    tensors = q, k, v, out, dout, lse.float().contiguous().unsqueeze(3), *gradients
    handle = _handle(q.device)
    frontend().set_stream(handle=handle, stream=torch.cuda.current_stream(q.device).cuda_stream)
    workspace: Tensor | None = None
    for row in range(0, q.shape[0], part.rows):
        for head in range(0, k.shape[1], part.kv_heads):
            parts = [_cut(x, row, head, part, k.shape[1]) for x in tensors]
            key = tuple((tuple(x.shape), x.stride(), x.dtype) for x in parts)
            graph = _graph(q.device, key, options.causal, options.scale)
            if workspace is None:
                workspace = torch.empty(graph.workspace, dtype=torch.uint8, device=q.device)
            graph.run(dict(zip(graph.tensors, parts, strict=True)), workspace, handle=handle)
    dq, dk, dv = gradients
    return dq, dk, dv


def _cut(x: Tensor, row: int, head: int, part: Part, kv_heads: int) -> Tensor:
    """A part of a tensor [B, heads, S, D]. Terms of queries (D = 1), whose strides cuDNN does not take, get those of a
    whole tensor."""
    group = x.shape[1] // kv_heads
    cut = x[row : row + part.rows, head * group : (head + part.kv_heads) * group]
    if x.shape[3] > 1 or part.rows > 1:
        return cut
    _, heads, queries, _ = cut.shape
    return cut.as_strided(cut.shape, (heads * queries, queries, 1, 1))


class _Graph(NamedTuple):
    run: Any
    tensors: list[Any]
    workspace: int  # bytes


@cache
def _handle(device: torch.device) -> Any:
    with torch.cuda.device(device):
        return frontend().create_handle()


@cache
def _graph(device: torch.device, key: tuple[Any, ...], causal: bool, scale: float) -> _Graph:
    """The graph for q, k, v, out, dout, lse, dq, dk and dv with these (sizes, strides, dtype).

    Built on a thread of its own: exceptions that the library catches may refer to the frames of its callers, and so to
    the tensors of a whole layer, until the garbage collector runs.
    """
    with ThreadPoolExecutor(1, initializer=torch.cuda.set_device, initargs=(device,)) as thread:
        return thread.submit(_built, device, key, causal, scale).result()


def _built(device: torch.device, key: tuple[Any, ...], causal: bool, scale: float) -> _Graph:
    cudnn = frontend()
    dtypes = {torch.bfloat16: "BFLOAT16", torch.float16: "HALF", torch.float32: "FLOAT"}
    types = {dtype: getattr(cudnn.data_type, name) for dtype, name in dtypes.items()}
    graph = cudnn.pygraph(
        handle=_handle(device),
        io_data_type=types[key[0][2]],
        intermediate_data_type=cudnn.data_type.FLOAT,
        compute_data_type=cudnn.data_type.FLOAT,
    )
    names = ("q", "k", "v", "o", "dO", "stats")
    given = {
        name: graph.tensor(name=name, dim=list(sizes), stride=list(strides), data_type=types[dtype])
        for name, (sizes, strides, dtype) in zip(names, key[:6], strict=True)
    }
    results = graph.sdpa_backward(
        name="backward", **given, attn_scale=scale, use_causal_mask=causal, use_deterministic_algorithm=True
    )
    for result, (sizes, strides, dtype) in zip(results, key[6:], strict=True):
        result.set_output(True).set_dim(list(sizes)).set_stride(list(strides)).set_data_type(types[dtype])
    graph.build([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    return _Graph(graph.execute, [*given.values(), *results], max(1, graph.get_workspace_size()))
