"""Packed segments, and runs of neighbouring segments, each computed by a call of its own.

A kernel for packed rows launches as many blocks for every segment as for the longest one. Beside a long document,
thousands of short ones cost more in blocks with nothing to do than in attention.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

Options = TypeVar("Options", bound=NamedTuple)  # AttentionOptions


class PackedLengths(NamedTuple):
    """Segments that do not attend to each other, of all rows joined end to end (flash attention's varlen form)."""

    cu_seqlens_q: Tensor  # [segments + 1] int32 on the device: where segments of the queries begin and end
    cu_seqlens_k: Tensor  # the same for the keys
    max_seqlens: tuple[int, int]  # the longest segment of the queries and of the keys
    runs: tuple[PackedRun, ...] = ()  # those to compute one by one; empty: all in one call


class PackedRun(NamedTuple):
    """Neighbouring segments."""

    queries: slice  # of the joined rows
    keys: slice
    lengths: PackedLengths


def forward_by_runs(
    attend: Callable[[Tensor, Tensor, Tensor, Options], tuple[Tensor, Tensor]],
    runs: Sequence[PackedRun],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: Options,
) -> tuple[Tensor, Tensor]:
    """`attend(q, k, v, options)`, (out [B, N, S, Dv], lse [B, N, S]), a run at a time."""
    joined = [_joined(x) for x in (q, k, v)]
    parts = []
    for run in runs:
        of_q, of_k, of_v = _cut(run, joined, 1)
        parts.append(attend(of_q, of_k, of_v, options._replace(lengths=run.lengths)))
    out, lse = zip(*parts, strict=True)
    return _as_rows(out, q), _as_rows([each.unsqueeze(-1) for each in lse], q).squeeze(-1)


def backward_by_runs(
    attend: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Options], tuple[Tensor, Tensor, Tensor]],
    runs: Sequence[PackedRun],
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    options: Options,
) -> tuple[Tensor, Tensor, Tensor]:
    """`attend(dout, q, k, v, out, lse, options)`, (dq, dk, dv), a run at a time."""
    joined = [_joined(x) for x in (dout, q, out, lse.unsqueeze(-1), k, v)]
    parts = []
    for run in runs:
        of_dout, of_q, of_out, of_lse, of_k, of_v = _cut(run, joined, 4)
        its = options._replace(lengths=run.lengths)
        parts.append(attend(of_dout, of_q, of_k, of_v, of_out, of_lse.squeeze(-1), its))
    dq, dk, dv = zip(*parts, strict=True)
    return _as_rows(dq, q), _as_rows(dk, k), _as_rows(dv, v)


def _joined(x: Tensor) -> Tensor:
    """[B, heads, S, D] as [1, heads, B S, D]."""
    return x.transpose(1, 2).flatten(0, 1).transpose(0, 1).unsqueeze(0)


def _as_rows(parts: Sequence[Tensor], like: Tensor) -> Tensor:
    """Parts [1, heads, tokens, D] as [B, heads, S, D], with the B and S of `like`; in memory [B, S, heads, D]."""
    tokens = torch.cat([part.transpose(1, 2) for part in parts], 1)
    return tokens.unflatten(1, (like.shape[0], like.shape[2])).squeeze(0).transpose(1, 2)


def _cut(run: PackedRun, joined: Sequence[Tensor], queries: int) -> list[Tensor]:
    """A run's part of each tensor: the first `queries` tensors are of queries, the others of keys."""
    return [x[:, :, run.queries if number < queries else run.keys] for number, x in enumerate(joined)]
