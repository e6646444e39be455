"""The blocks of a cp rank's attention (see document_mask), computed with one rank's keys at a time."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pentad.kernels.attention.attention_partial import QKVGrads, partial_attention, partial_attention_backward
from pentad.kernels.attention.attention_reference import AttentionOptions
from pentad.workers.parallel.document_mask import Block, Step


class Inputs(NamedTuple):
    """The inputs of one rank's attention, the blocks to compute, and how many of the first keys and values a ring
    passes on (None: all)."""

    q: Tensor  # [B, N, S, D]
    k: Tensor  # [B, M, S, D]
    v: Tensor  # [B, M, S, Dv]
    steps: tuple[Step, ...]
    options: AttentionOptions
    passed: int | None = None

    def options_at(self, at: Block) -> AttentionOptions:
        return self.options._replace(
            causal=at.causal, lengths=at.lengths, fixed_shape=at.fixed_shape, window_left=at.window_left
        )


class SavedBlocks(NamedTuple):
    """What B needs."""

    inputs: Inputs
    out: Tensor  # [B, N, S, Dv]
    lse: Tensor  # [B, N, S], of the softmax over the keys of all ranks and the sinks; float32 or wider


def block_forward(inputs: Inputs, at: Block, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """(out, lse) of one block, given the keys and values of the rank that owns them."""
    q, k, v = inputs.q[:, :, at.queries], k[:, :, at.keys], v[:, :, at.keys]
    return partial_attention(q, k, v, inputs.options_at(at))


def block_backward(saved: SavedBlocks, dout: Tensor, at: Block, k: Tensor, v: Tensor) -> QKVGrads:
    """(dq, dk, dv) of one block."""
    dout, q, out, lse = (x[:, :, at.queries] for x in (dout, saved.inputs.q, saved.out, saved.lse))
    k, v = k[:, :, at.keys], v[:, :, at.keys]
    return partial_attention_backward(dout, q, k, v, out, lse, saved.inputs.options_at(at))


def pack_kv(k: Tensor, v: Tensor) -> Tensor:
    """Keys and values as one flat message."""
    return torch.cat([k.reshape(-1), v.reshape(-1)])


def unpack_kv(packed: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Views of a message [..., elements] in the shapes of `k` and `v`."""
    keys, values = packed.split([k.numel(), v.numel()], dim=-1)
    return keys.unflatten(-1, k.shape), values.unflatten(-1, v.shape)
